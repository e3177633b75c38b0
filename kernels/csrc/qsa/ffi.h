// What the XLA FFI handlers of QSA's kernels have in common: names of buffers, and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxcp::qsa {

namespace ffi = xla::ffi;
using Ints = ffi::Buffer<ffi::S32>;
using Halves = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;

// An argument of the call `what` is wrong.
inline ffi::Error invalid_argument(const char* what, const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("jaxcp ") + what + ": " + why);
}

// How launching the kernels of `what` went.
inline ffi::Error launched(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxcp ") + what + ": launch: " + cudaGetErrorString(error));
}

}  // namespace jaxcp::qsa

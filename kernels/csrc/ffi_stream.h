// What the GPU handlers share: the one-stream rule, loading, and CUDA errors in XLA's and Python's words.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <thread>

#include "ffi_exchange.h"

namespace jaxcp {

inline ffi::Error launched(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(std::string("jaxcp exchange: launch: ") + cudaGetErrorString(error));
}

// The GPU that XLA made current for this call, as the CUDA runtime and Python's Config number it.
inline int current_device() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

// The rule at the top of workspace.h: eager calls on one stream, captures on any.
inline ffi::Error ordered(Workspace& workspace, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaError_t e = cudaStreamIsCapturing(stream, &capture); e != cudaSuccess) return launched(e);
  if (capture != cudaStreamCaptureStatusNone || workspace.bind(stream)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    "jaxcp exchange: exchange " + std::to_string(workspace.config.exchange) +
                        " was called on a second stream; its calls must run on one ordered CUDA stream. Take the call out of "
                        "compute_on, or give that stream an Exchange of its own.");
}

// Calls `load` with `device` current, on a thread of its own (the caller's current device stays); null, or an error.
template <class Load>
const char* loaded(int32_t device, Load load) {
  cudaError_t error = cudaSuccess;
  std::thread([&] {
    error = cudaSetDevice(device);
    if (error == cudaSuccess) error = load();
  }).join();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace jaxcp

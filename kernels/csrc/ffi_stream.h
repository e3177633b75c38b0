// What the GPU handlers of the exchange share: the one-stream rule, and CUDA errors in XLA's words.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "device.h"
#include "ffi_exchange.h"

namespace jaxcp {

inline ffi::Error launched(cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(std::string("jaxcp exchange: launch: ") + cudaGetErrorString(error));
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

}  // namespace jaxcp

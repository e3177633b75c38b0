// What every GPU library asks of the CUDA runtime: the current device, and loading kernels ahead of time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <thread>

namespace jaxcp {

// The GPU that XLA made current for this call, as the CUDA runtime and Python's Config number it.
inline int current_device() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
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

// Calls of the CUDA runtime on behalf of a device: their errors as exceptions, the caller's current device left alone.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

namespace jaxcp::memory {

inline void checked(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it: later calls must not report this one
  throw std::runtime_error(what + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

// Runs `work` with `device` current. On a thread of its own: the caller's current device is the caller's business, and
// restoring it would create a context on GPU 0 in every process that never used it.
template <class Work>
void on_device(int device, Work work) {
  std::exception_ptr failure;
  std::thread([&] {
    try {
      checked(cudaSetDevice(device), "cudaSetDevice " + std::to_string(device));
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace jaxcp::memory

// GPU memory of a workspace: cudaMalloc, peer access inside a process, CUDA IPC between processes of a host,
// fabric handles (memory_fabric.h) between hosts of an NVLink domain.
#include "memory.h"

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "memory_fabric.h"
#include "on_device.h"

namespace jaxcp::memory {
namespace {

// cudaMalloc puts small blocks into one 2 MiB page, and a process can open the IPC handle of a page once only.
std::size_t whole_pages(std::size_t bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

std::optional<std::string> domain_blocker(int device) { return vmm::blocker(device, vmm::HandleType::fabric); }

void* allocate(int device, std::size_t bytes, Reach reach) {
  if (reach == Reach::domain) return vmm::allocate(device, bytes, vmm::HandleType::fabric);
  if (reach == Reach::host) bytes = whole_pages(bytes);
  void* block = nullptr;
  on_device(device, [&] { checked(cudaMalloc(&block, bytes), "cudaMalloc of " + std::to_string(bytes) + " bytes"); });
  return block;
}

void release(int device, void* block, std::size_t, Reach reach) {
  if (reach == Reach::domain) return vmm::release(device, block);
  on_device(device, [&] { checked(cudaFree(block), "cudaFree"); });
}

Handle export_handle(int device, void* block, Reach reach) {
  if (reach == Reach::domain) return std::get<Handle>(vmm::export_block(device, block, vmm::HandleType::fabric));
  static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes);
  cudaIpcMemHandle_t exported;
  on_device(device, [&] { checked(cudaIpcGetMemHandle(&exported, block), "cudaIpcGetMemHandle"); });
  Handle handle;
  std::memcpy(handle.bytes, &exported, kHandleBytes);
  return handle;
}

void forget_name(int, void*) {}  // neither type of handle has a name in the file system

void* import_handle(int device, const Handle& handle, std::size_t bytes, Reach reach) {
  if (reach == Reach::domain) return vmm::import_block(device, handle, bytes);
  cudaIpcMemHandle_t exported;
  std::memcpy(&exported, handle.bytes, kHandleBytes);
  void* block = nullptr;
  on_device(device, [&] {
    checked(cudaIpcOpenMemHandle(&block, exported, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  });
  return block;
}

void release_import(int device, void* block, std::size_t, Reach reach) {
  if (reach == Reach::domain) return vmm::release(device, block);
  on_device(device, [&] { checked(cudaIpcCloseMemHandle(block), "cudaIpcCloseMemHandle"); });
}

void enable_peer(int device, int peer) {
  if (device == peer) return;
  on_device(device, [&] {
    int possible = 0;
    checked(cudaDeviceCanAccessPeer(&possible, device, peer), "cudaDeviceCanAccessPeer");
    if (!possible) {
      throw std::runtime_error("no peer access from GPU " + std::to_string(device) + " to GPU " + std::to_string(peer));
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // XLA or an earlier workspace did it; later calls must not report this
    } else {
      checked(error, "cudaDeviceEnablePeerAccess");
    }
  });
}

void* allocate_mapped(int device, std::size_t bytes, void** seen_by_device) {
  void* block = nullptr;
  on_device(device, [&] {
    checked(cudaHostAlloc(&block, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(block, 0, bytes);
    checked(cudaHostGetDevicePointer(seen_by_device, block, 0), "cudaHostGetDevicePointer");
  });
  return block;
}

void release_mapped(int device, void* block, std::size_t) {
  on_device(device, [&] { checked(cudaFreeHost(block), "cudaFreeHost"); });
}

void copy_to_device(int device, void* target, const void* source, std::size_t bytes) {
  on_device(device, [&] { checked(cudaMemcpy(target, source, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device"); });
}

void copy_to_host(int device, void* target, const void* source, std::size_t bytes) {
  on_device(device, [&] { checked(cudaMemcpy(target, source, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host"); });
}

void fill(int device, void* block, int value, std::size_t bytes) {
  on_device(device, [&] {
    checked(cudaMemset(block, value, bytes), "cudaMemset");
    checked(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}

void synchronize(int device) {
  on_device(device, [] { checked(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
}

}  // namespace jaxcp::memory

// Memory that peers can write: the only thing in which the GPU and its host twin differ when a workspace is made.
//
// memory_cuda.cc: cudaMalloc, peer access inside a process, CUDA IPC handles between processes of a host; between hosts
// the fabric handles of memory_fabric.h.
// memory_host.cc: anonymous pages inside a process, POSIX shared memory between processes of a host.
//
// All functions throw std::runtime_error with the system's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace jaxcp::memory {

constexpr std::size_t kHandleBytes = 64;  // cudaIpcMemHandle_t, CUmemFabricHandle; longer than our shared-memory names

// What another process needs to map a block.
struct Handle {
  char bytes[kHandleBytes];
};

// Who can map a block: this process; processes of this host; processes on the hosts of an NVLink domain, this one too.
enum class Reach : int32_t { process, host, domain };

// Why memory of `device` cannot be mapped on other hosts, with what to do, or nothing.
std::optional<std::string> domain_blocker(int device);

void* allocate(int device, std::size_t bytes, Reach reach);
void release(int device, void* block, std::size_t bytes, Reach reach);

// Not for Reach::process. forget_name: no further process will map it (shared memory then dies with its users).
Handle export_handle(int device, void* block, Reach reach);
void forget_name(int device, void* block);
void* import_handle(int device, const Handle& handle, std::size_t bytes, Reach reach);
void release_import(int device, void* block, std::size_t bytes, Reach reach);

// Lets `device` write memory of `peer`, another device of this process.
void enable_peer(int device, int peer);

// Memory that both the device and the host see, zeroed; `*seen_by_device` is the device's address of it.
void* allocate_mapped(int device, std::size_t bytes, void** seen_by_device);
void release_mapped(int device, void* block, std::size_t bytes);

void copy_to_device(int device, void* target, const void* source, std::size_t bytes);
void copy_to_host(int device, void* target, const void* source, std::size_t bytes);
// Every byte becomes `value`, before the call returns: a fast peer may write as soon as it can map the block.
void fill(int device, void* block, int value, std::size_t bytes);

// Waits for everything that was launched on `device`; on the host nothing is.
void synchronize(int device);

}  // namespace jaxcp::memory

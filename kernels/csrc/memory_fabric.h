// GPU memory that processes on several hosts of one NVLink domain can map: the driver's virtual memory
// management (VMM).
//
// STEPS. `allocate`: physical memory that may leave the process (cuMemCreate), a range of addresses
// (cuMemAddressReserve), the one put behind the other (cuMemMap) and opened to the device (cuMemSetAccess).
// `export_block`: the memory's name for others (cuMemExportToShareableHandle). `import_block`, in any process that got
// the name: the memory (cuMemImportFromShareableHandle), then addresses, map and access as above. `release` undoes
// either.
//
// WHAT REPLACES WHAT. memory_cuda.cc takes these functions for blocks of Reach::domain, and for no others:
//
//     cudaMalloc            -> allocate            cudaIpcOpenMemHandle                  -> import_block
//     cudaIpcGetMemHandle   -> export_block        cudaFree, cudaIpcCloseMemHandle       -> release
//
// cudaDeviceEnablePeerAccess opens nothing here: another device of the same process imports the block as well.
//
// HANDLE TYPES. They differ in the memory's name alone. `fabric`: 64 bytes, good on every host of the domain; it needs
// GPUs that are in one, and an IMEX channel, which `blocker` finds out. `file_descriptor`: good on this host, on any
// GPU; no workspace uses it, tests walk the same steps with it where there is no fabric.
//
// WHO KEEPS THE MEMORY. A map does: a block lives until its owner and all importers have released it, in any order. No
// handle is stored, the driver finds an allocation by its address.
//
// NOT YET RUN BETWEEN HOSTS. tests/test_fabric_memory.py runs all steps with file descriptors, within a process and
// from one to another, and with fabric handles on a host that has them. How a rank sees the loss of another host, whose
// memory it has mapped, is untested: the bounded waits assume that stores to a dead peer's block go somewhere.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "memory.h"

namespace jaxcp::memory::vmm {

enum class HandleType { file_descriptor, fabric };

// A block's name for others: a descriptor, which the caller closes, or the bytes of a CUmemFabricHandle.
using Exported = std::variant<int, Handle>;

// Why `device` cannot share memory by this type of handle, with what to do, or nothing. Tries it on a small block: the
// driver's attribute alone does not tell whether this process may use a channel.
std::optional<std::string> blocker(int device, HandleType type);

// All of them throw std::runtime_error with the driver's own words.
void* allocate(int device, std::size_t bytes, HandleType type);
Exported export_block(int device, void* block, HandleType type);
void* import_block(int device, const Exported& exported, std::size_t bytes);  // as many bytes as were allocated
void release(int device, void* block);                                        // allocated or imported

}  // namespace jaxcp::memory::vmm

#include "memory_fabric.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>

#include "on_device.h"

namespace jaxcp::memory::vmm {
namespace {

constexpr unsigned kDriverApi = 12030;  // CUDA 12.3: the first with fabric handles

// A function of the driver, found at run time: nothing links libcuda, which a machine without GPU does not have.
template <class Function>
Function entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  checked(cudaGetDriverEntryPointByVersion(name, &found, kDriverApi, cudaEnableDefault, &result),
          std::string("looking up ") + name + ", for which the driver must be of CUDA 12.3 or newer");
  if (found == nullptr) throw std::runtime_error(std::string("the driver of CUDA 12.3 has ") + name + ", this one not");
  return reinterpret_cast<Function>(found);
}

struct Driver {
#define JAXCP_ENTRY(name) decltype(&::name) name = entry<decltype(&::name)>(#name)
  JAXCP_ENTRY(cuDeviceGet);
  JAXCP_ENTRY(cuDeviceGetAttribute);
  JAXCP_ENTRY(cuGetErrorName);
  JAXCP_ENTRY(cuGetErrorString);
  JAXCP_ENTRY(cuMemAddressFree);
  JAXCP_ENTRY(cuMemAddressReserve);
  JAXCP_ENTRY(cuMemCreate);
  JAXCP_ENTRY(cuMemExportToShareableHandle);
  JAXCP_ENTRY(cuMemGetAddressRange);
  JAXCP_ENTRY(cuMemGetAllocationGranularity);
  JAXCP_ENTRY(cuMemImportFromShareableHandle);
  JAXCP_ENTRY(cuMemMap);
  JAXCP_ENTRY(cuMemRelease);
  JAXCP_ENTRY(cuMemRetainAllocationHandle);
  JAXCP_ENTRY(cuMemSetAccess);
  JAXCP_ENTRY(cuMemUnmap);
#undef JAXCP_ENTRY
};

const Driver& driver() {
  static const Driver found;
  return found;
}

constexpr const char* kNeedsChannel =
    "Fabric handles need an IMEX channel: nvidia-caps-imex-channels in /proc/devices, and the same "
    "/dev/nvidia-caps-imex-channels/channel* on all hosts, which this user may open (in a container: mounted)";
constexpr const char* kNeedsDomain =
    "Fabric handles need GPUs of one NVLink domain (nvidia-smi -q, section Fabric: State Completed, one ClusterUUID "
    "and CliqueId) and the service nvidia-imex on every host";

// `remedied`: a failure of this step may come from the fabric's set-up.
void check(CUresult result, const std::string& step, bool remedied = false) {
  if (result == CUDA_SUCCESS) return;
  const char *name = "an error without a name", *words = "";
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &words);
  std::string message = step + ": " + name + " (" + words + ")";
  if (remedied && result != CUDA_ERROR_OUT_OF_MEMORY) {
    message += std::string(". ") + (result == CUDA_ERROR_NOT_PERMITTED ? kNeedsChannel : kNeedsDomain);
  }
  throw std::runtime_error(message);
}

// A reference to physical memory, given back at the end of its scope; maps keep the memory.
struct Memory {
  CUmemGenericAllocationHandle handle = 0;
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (handle != 0) driver().cuMemRelease(handle);
  }
};

CUmemAllocationHandleType native(HandleType type) {
  return type == HandleType::fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp properties(int device, HandleType type) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  wanted.requestedHandleTypes = native(type);
  return wanted;
}

// What the driver makes of `bytes`; owner and importers come to the same number.
std::size_t whole_granules(const CUmemAllocationProp& wanted, std::size_t bytes) {
  std::size_t granule = 0;
  check(driver().cuMemGetAllocationGranularity(&granule, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
  return (bytes + granule - 1) / granule * granule;
}

// Addresses of `memory` that `device` can read and write.
void* mapped(int device, const Memory& memory, std::size_t size) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdeviceptr address = 0;
  check(driver().cuMemAddressReserve(&address, size, 0, 0, 0), "cuMemAddressReserve");
  bool in_place = false;
  try {
    check(driver().cuMemMap(address, size, 0, memory.handle, 0), "cuMemMap");
    in_place = true;
    check(driver().cuMemSetAccess(address, size, &access, 1), "cuMemSetAccess");
  } catch (...) {
    if (in_place) driver().cuMemUnmap(address, size);
    driver().cuMemAddressFree(address, size);
    throw;
  }
  return reinterpret_cast<void*>(address);
}

void check_attribute(int device, HandleType type) {
  const bool fabric = type == HandleType::fabric;
  CUdevice found = 0;
  int supported = 0;
  check(driver().cuDeviceGet(&found, device), "cuDeviceGet");
  check(driver().cuDeviceGetAttribute(&supported,
                                      fabric ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
                                             : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                      found),
        "cuDeviceGetAttribute");
  if (supported) return;
  throw std::runtime_error(
      fabric ? std::string("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED is 0. ") + kNeedsDomain
             : "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED is 0: this driver shares no memory so");
}

}  // namespace

std::optional<std::string> blocker(int device, HandleType type) {
  try {
    on_device(device, [&] { check_attribute(device, type); });
    release(device, allocate(device, 1, type));
    return std::nullopt;
  } catch (const std::runtime_error& error) {
    return "GPU " + std::to_string(device) + ": " + error.what();
  }
}

void* allocate(int device, std::size_t bytes, HandleType type) {
  void* block = nullptr;
  on_device(device, [&] {
    const CUmemAllocationProp wanted = properties(device, type);
    const std::size_t size = whole_granules(wanted, bytes);
    Memory memory;
    check(driver().cuMemCreate(&memory.handle, size, &wanted, 0), "cuMemCreate of " + std::to_string(size) + " bytes",
          type == HandleType::fabric);
    block = mapped(device, memory, size);
  });
  return block;
}

Exported export_block(int device, void* block, HandleType type) {
  Handle name{};
  static_assert(sizeof(CUmemFabricHandle) == sizeof name.bytes);
  on_device(device, [&] {
    Memory memory;
    check(driver().cuMemRetainAllocationHandle(&memory.handle, block), "cuMemRetainAllocationHandle");
    check(driver().cuMemExportToShareableHandle(name.bytes, memory.handle, native(type), 0),
          "cuMemExportToShareableHandle", type == HandleType::fabric);
  });
  if (type == HandleType::fabric) return name;
  int descriptor = -1;
  std::memcpy(&descriptor, name.bytes, sizeof descriptor);
  return descriptor;
}

void* import_block(int device, const Exported& exported, std::size_t bytes) {
  void* block = nullptr;
  on_device(device, [&] {
    Handle name{};
    void* named = name.bytes;
    HandleType type = HandleType::fabric;
    if (const int* descriptor = std::get_if<int>(&exported)) {
      named = reinterpret_cast<void*>(static_cast<std::intptr_t>(*descriptor));  // by value, as the driver wants it
      type = HandleType::file_descriptor;
    } else {
      name = std::get<Handle>(exported);
    }
    Memory memory;
    check(driver().cuMemImportFromShareableHandle(&memory.handle, named, native(type)),
          "cuMemImportFromShareableHandle", type == HandleType::fabric);
    block = mapped(device, memory, whole_granules(properties(device, type), bytes));
  });
  return block;
}

void release(int device, void* block) {
  on_device(device, [&] {
    const auto address = reinterpret_cast<CUdeviceptr>(block);
    std::size_t size = 0;
    check(driver().cuMemGetAddressRange(nullptr, &size, address), "cuMemGetAddressRange");
    check(driver().cuMemUnmap(address, size), "cuMemUnmap");
    check(driver().cuMemAddressFree(address, size), "cuMemAddressFree");
  });
}

}  // namespace jaxcp::memory::vmm

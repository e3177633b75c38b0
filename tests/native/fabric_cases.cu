// Cases of memory that other processes map (kernels/csrc/memory_fabric.h). Usage: fabric_cases NAME; without a name:
// prints the names. A handle type that this machine lacks: prints "NAME: not available here: ..." and succeeds.
#include <cuda_runtime.h>
#include <sys/wait.h>

#include <cstdio>
#include <functional>
#include <vector>

#include "handle_socket.h"
#include "memory_fabric.h"
#include "on_device.h"

namespace jaxcp::test {
namespace {

using memory::vmm::HandleType;

constexpr int kDevice = 0;
constexpr std::size_t kBytes = (std::size_t{5} << 20) + 16;  // no whole number of pages
constexpr int kWords = kBytes / sizeof(uint32_t);

struct NotAvailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__global__ void write_words(uint32_t* block, uint32_t seed) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += gridDim.x * blockDim.x) block[i] = seed + i;
}

// By a kernel, as an exchange writes its peers' blocks.
void write_block(int device, void* block, uint32_t seed) {
  memory::on_device(device, [&] {
    write_words<<<64, 256>>>(static_cast<uint32_t*>(block), seed);
    memory::checked(cudaGetLastError(), "write_words");
    memory::checked(cudaDeviceSynchronize(), "write_words");
  });
}

void expect(int device, const void* block, const std::function<uint32_t(uint32_t)>& word, const char* what) {
  std::vector<uint32_t> found(kWords);
  memory::copy_to_host(device, found.data(), block, kBytes);
  for (uint32_t i = 0; i < kWords; ++i) {
    if (found[i] == word(i)) continue;
    throw std::runtime_error(std::string(what) + ": word " + std::to_string(i) + " is " + std::to_string(found[i]));
  }
}

std::function<uint32_t(uint32_t)> written(uint32_t seed) {
  return [seed](uint32_t i) { return seed + i; };
}
uint32_t blank(uint32_t) { return ~uint32_t{0}; }

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  memory::on_device(kDevice, [&] { memory::checked(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"); });
  return free;
}

// Runs `work` to warm up, then again: what the driver keeps for itself is far less than a block.
void losing_nothing(const std::function<void()>& work) {
  work();
  const std::size_t before = free_bytes();
  work();
  const std::size_t after = free_bytes();
  require(after + kBytes > before, std::to_string(before - after) + " bytes were not given back");
}

void need(HandleType type) {
  if (const auto why = memory::vmm::blocker(kDevice, type)) throw NotAvailable(*why);
}

// The last GPU of the process: where there are several, a peer.
int importer() {
  int count = 0;
  memory::checked(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count - 1;
}

void once(HandleType type) {
  const int peer = importer();
  void* own = memory::vmm::allocate(kDevice, kBytes, type);
  memory::fill(kDevice, own, 0xFF, kBytes);
  const auto exported = memory::vmm::export_block(kDevice, own, type);
  void* imported = memory::vmm::import_block(peer, exported, kBytes);
  close_exported(exported);
  require(imported != own, "an import has addresses of its own");
  expect(peer, imported, blank, "blank, read through the import");
  write_block(peer, imported, 1000);
  expect(kDevice, own, written(1000), "written through the import");
  write_block(kDevice, own, 2000);
  expect(peer, imported, written(2000), "written by the owner");
  memory::fill(kDevice, own, 0xFF, kBytes);
  expect(peer, imported, blank, "blanked by the owner");
  memory::vmm::release(kDevice, own);
  write_block(peer, imported, 3000);
  expect(peer, imported, written(3000), "after the owner's release");
  memory::vmm::release(peer, imported);
}

// Allocate, export, import in the same process, write each way, blank, release; nothing is lost on the way.
void in_one_process(HandleType type) {
  need(type);
  losing_nothing([&] {
    for (int i = 0; i < 10; ++i) once(type);
  });
}
void file_descriptor() { in_one_process(HandleType::file_descriptor); }
void fabric() { in_one_process(HandleType::fabric); }

// What the two processes do; the way in which they share is the case's.
struct Sharing {
  std::function<void()> need;
  std::function<void*()> allocate;
  std::function<memory::vmm::Exported(void*)> exported;
  std::function<void*(const memory::vmm::Exported&)> imported;
  std::function<void(void*)> release, release_import;
};

int import_and_write(int socket, const Sharing& sharing) {
  try {
    const auto exported = receive(socket);
    if (!exported) return 1;
    void* block = sharing.imported(*exported);
    close_exported(*exported);
    expect(kDevice, block, written(1000), "the owner's words");
    write_block(kDevice, block, 2000);
    step(socket);
    await_step(socket);
    expect(kDevice, block, blank, "blanked by the owner");
    sharing.release_import(block);
    step(socket);
    return 0;
  } catch (const std::exception& error) {
    std::printf("importing process: %s\n", error.what());
    std::fflush(stdout);
    return 1;
  }
}

void own_and_read(int socket, const Sharing& sharing) {
  sharing.need();
  void* block = sharing.allocate();
  write_block(kDevice, block, 1000);
  const auto exported = sharing.exported(block);
  send(socket, exported);
  close_exported(exported);
  await_step(socket);
  expect(kDevice, block, written(2000), "the importer's words");
  memory::fill(kDevice, block, 0xFF, kBytes);
  step(socket);
  await_step(socket);
  sharing.release(block);
}

// One process owns, another imports. The fork comes before either touches CUDA.
void in_two_processes(const Sharing& sharing) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
  std::fflush(stdout);
  const pid_t child = fork();
  require(child >= 0, "fork");
  if (child == 0) {
    close(ends[0]);
    std::_Exit(import_and_write(ends[1], sharing));
  }
  close(ends[1]);
  try {
    own_and_read(ends[0], sharing);
  } catch (...) {
    close(ends[0]);  // ends the child's waiting
    waitpid(child, nullptr, 0);
    throw;
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(status == 0, "the importing process failed");
}

Sharing by_handle(HandleType type) {
  return {[=] { need(type); },
          [=] { return memory::vmm::allocate(kDevice, kBytes, type); },
          [=](void* block) { return memory::vmm::export_block(kDevice, block, type); },
          [=](const memory::vmm::Exported& exported) { return memory::vmm::import_block(kDevice, exported, kBytes); },
          [](void* block) { memory::vmm::release(kDevice, block); },
          [](void* block) { memory::vmm::release(kDevice, block); }};
}

// As a workspace asks for it.
Sharing by_reach(memory::Reach reach) {
  return {[=] {
            if (reach != memory::Reach::domain) return;
            if (const auto why = memory::domain_blocker(kDevice)) throw NotAvailable(*why);
          },
          [=] { return memory::allocate(kDevice, kBytes, reach); },
          [=](void* block) { return memory::export_handle(kDevice, block, reach); },
          [=](const memory::vmm::Exported& exported) {
            return memory::import_handle(kDevice, std::get<memory::Handle>(exported), kBytes, reach);
          },
          [=](void* block) { memory::release(kDevice, block, kBytes, reach); },
          [=](void* block) { memory::release_import(kDevice, block, kBytes, reach); }};
}

void file_descriptor_processes() { in_two_processes(by_handle(HandleType::file_descriptor)); }
void fabric_processes() { in_two_processes(by_handle(HandleType::fabric)); }
void reach_host() { in_two_processes(by_reach(memory::Reach::host)); }
void reach_domain() { in_two_processes(by_reach(memory::Reach::domain)); }

void expect_error(const std::function<void()>& action, const std::string& words) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    const std::string found = error.what();
    if (found.find(words) == std::string::npos) throw std::runtime_error("no '" + words + "' in: " + found);
    return;
  }
  throw std::runtime_error("no error, expected: " + words);
}

// Errors come in the driver's words, lose nothing, and leave the device usable.
void refused() {
  const HandleType type = HandleType::file_descriptor;
  need(type);
  losing_nothing([&] {
    expect_error([&] { memory::vmm::allocate(kDevice, std::size_t{1} << 45, type); },
                 "bytes: CUDA_ERROR_OUT_OF_MEMORY (");
    expect_error([&] { memory::vmm::import_block(kDevice, -1, kBytes); },
                 "cuMemImportFromShareableHandle: CUDA_ERROR_");
    void* own = memory::vmm::allocate(kDevice, kBytes, type);
    const auto exported = memory::vmm::export_block(kDevice, own, type);
    expect_error([&] { memory::vmm::import_block(kDevice, exported, 4 * kBytes); }, "cuMemMap: CUDA_ERROR_");
    close_exported(exported);
    memory::vmm::release(kDevice, own);
    void* ordinary = memory::allocate(kDevice, kBytes, memory::Reach::process);
    expect_error([&] { memory::vmm::export_block(kDevice, ordinary, type); },
                 "cuMemRetainAllocationHandle: CUDA_ERROR_");
    memory::release(kDevice, ordinary, kBytes, memory::Reach::process);
    once(type);
  });
}

struct Case {
  const char* name;
  void (*run)();
};
const Case kCases[] = {
    {"file_descriptor", file_descriptor},
    {"file_descriptor_processes", file_descriptor_processes},
    {"fabric", fabric},
    {"fabric_processes", fabric_processes},
    {"reach_host", reach_host},
    {"reach_domain", reach_domain},
    {"refused", refused},
};

}  // namespace
}  // namespace jaxcp::test

int main(int argc, char** argv) {
  using namespace jaxcp::test;
  for (const Case& c : kCases) {
    if (argc < 2) {
      std::printf("%s\n", c.name);
    } else if (std::string(argv[1]) == c.name) {
      try {
        c.run();
        std::printf("%s: ok\n", c.name);
        return 0;
      } catch (const NotAvailable& why) {
        std::printf("%s: not available here: %s\n", c.name, why.what());
        return 0;
      } catch (const std::exception& error) {
        std::printf("%s: FAILED: %s\n", c.name, error.what());
        return 1;
      }
    }
  }
  if (argc < 2) return 0;
  std::printf("no case is called %s\n", argv[1]);
  return 2;
}

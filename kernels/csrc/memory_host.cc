// The host twin's memory: anonymous pages inside a process, POSIX shared memory between processes of a host.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace jaxcp::memory {
namespace {

// Names of the shared blocks of this process. Never destroyed: a call may end, and free its block, while the process exits.
std::mutex& names_mutex = *new std::mutex;
std::map<void*, std::string>& names = *new std::map<void*, std::string>;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

void* map(int file, std::size_t bytes, const std::string& what) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (block == MAP_FAILED) fail(what + " (" + std::to_string(bytes) + " bytes)");
  return block;
}

std::string fresh_name() {
  static std::atomic<unsigned> count{0};
  return "/jaxcp-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

}  // namespace

std::optional<std::string> domain_blocker(int) { return "the host twin shares memory between processes of one host only"; }

void* allocate(int device, std::size_t bytes, Reach reach) {
  if (reach == Reach::domain) throw std::runtime_error(*domain_blocker(device));
  if (reach == Reach::process) return map(-1, bytes, "mmap");
  const std::string name = fresh_name();
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) fail("shm_open " + name);
  // posix_fallocate takes the pages now: a full /dev/shm is an error here, not a SIGBUS at the first write.
  if (const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes))) {
    close(file);
    shm_unlink(name.c_str());
    errno = error;
    fail("posix_fallocate " + name + " of " + std::to_string(bytes) + " bytes");
  }
  void* block = map(file, bytes, "mmap " + name);
  close(file);
  const std::lock_guard lock(names_mutex);
  names[block] = name;
  return block;
}

void release(int device, void* block, std::size_t bytes, Reach) {
  forget_name(device, block);
  munmap(block, bytes);
}

Handle export_handle(int, void* block, Reach) {
  const std::lock_guard lock(names_mutex);
  Handle handle{};
  names.at(block).copy(handle.bytes, kHandleBytes - 1);
  return handle;
}

void forget_name(int, void* block) {
  const std::lock_guard lock(names_mutex);
  const auto found = names.find(block);
  if (found == names.end()) return;
  shm_unlink(found->second.c_str());
  names.erase(found);
}

void* import_handle(int, const Handle& handle, std::size_t bytes, Reach) {
  const std::string name(handle.bytes, strnlen(handle.bytes, kHandleBytes));
  const int file = shm_open(name.c_str(), O_RDWR, 0600);
  if (file < 0) fail("shm_open " + name + " of a peer");
  void* block = map(file, bytes, "mmap " + name);
  close(file);
  return block;
}

void release_import(int, void* block, std::size_t bytes, Reach) { munmap(block, bytes); }

void enable_peer(int, int) {}  // threads of one process share their memory

void* allocate_mapped(int, std::size_t bytes, void** seen_by_device) {
  return *seen_by_device = map(-1, bytes, "mmap");
}

void release_mapped(int, void* block, std::size_t bytes) { munmap(block, bytes); }

void copy_to_device(int, void* target, const void* source, std::size_t bytes) { std::memcpy(target, source, bytes); }
void copy_to_host(int, void* target, const void* source, std::size_t bytes) { std::memcpy(target, source, bytes); }
void fill(int, void* block, int value, std::size_t bytes) { std::memset(block, value, bytes); }

void synchronize(int) {}  // there is no device; a workspace counts the twin's running calls itself

}  // namespace jaxcp::memory

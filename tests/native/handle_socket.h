// How two processes of a test hand each other an exported block and take turns: a pair of sockets.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "memory_fabric.h"

namespace jaxcp::test {

inline void require(bool held, const std::string& what) {
  if (!held) throw std::runtime_error(what);
}

inline void close_exported(const memory::vmm::Exported& exported) {
  if (const int* descriptor = std::get_if<int>(&exported)) close(*descriptor);
}

// What a process sends another: the bytes of a handle, or a descriptor, which the system duplicates on its way.
inline void send(int socket, const memory::vmm::Exported& exported) {
  memory::Handle bytes{};
  iovec part{bytes.bytes, sizeof bytes.bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1;
  if (const int* descriptor = std::get_if<int>(&exported)) {
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptor, sizeof(int));
  } else {
    bytes = std::get<memory::Handle>(exported);
  }
  require(sendmsg(socket, &message, 0) == sizeof bytes.bytes, "sendmsg");
}

// Nothing if the owner gave up before it had a handle, and said why.
inline std::optional<memory::vmm::Exported> receive(int socket) {
  memory::Handle bytes{};
  iovec part{bytes.bytes, sizeof bytes.bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part, message.msg_iovlen = 1, message.msg_control = control,
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_WAITALL) != sizeof bytes.bytes) return std::nullopt;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr) return bytes;
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return descriptor;
}

inline void step(int socket) {
  const char byte = 0;
  require(write(socket, &byte, 1) == 1, "the other process is gone");
}
inline void await_step(int socket) {
  char byte = 0;
  require(read(socket, &byte, 1) == 1, "the other process failed");
}

}  // namespace jaxcp::test

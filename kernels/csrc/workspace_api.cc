// The C interface through which Python makes, connects, inspects and frees workspaces (ctypes: jaxcp/native/library.py).
//
// Every function returns null, or a message that stays valid until the thread's next call.
#include <cstring>
#include <exception>
#include <string>

#include "block.h"
#include "workspace.h"

namespace {

using jaxcp::Config;
using jaxcp::Registry;
using jaxcp::Workspace;

template <class Action>
const char* guarded(Action action) {
  static thread_local std::string message;
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

std::shared_ptr<Workspace> find(const Config* config) {
  return Registry::instance().find(config->exchange, config->device, config->rank);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

uint32_t jaxcp_protocol_version() { return jaxcp::block::version(); }
uint64_t jaxcp_workspace_bytes(const Config* config) { return jaxcp::block::bytes(*config); }

// `text` receives why memory of the device cannot be mapped on other hosts, or stays empty.
const char* jaxcp_domain_blocker(int32_t device, char* text, uint64_t size) {
  return guarded([&] {
    if (const auto why = jaxcp::memory::domain_blocker(device)) std::strncpy(text, why->c_str(), size - 1);
  });
}

const char* jaxcp_create(const Config* config) {
  return guarded([&] { Registry::instance().insert(std::make_shared<Workspace>(*config)); });
}

const char* jaxcp_export(const Config* config, jaxcp::memory::Handle* handle) {
  return guarded([&] { *handle = find(config)->handle(); });
}

// A peer of this process: found in the table under its own config.
const char* jaxcp_attach(const Config* config, const Config* peer) {
  return guarded([&] { find(config)->attach(find(peer)); });
}

const char* jaxcp_attach_handle(const Config* config, int32_t rank, const jaxcp::memory::Handle* handle) {
  return guarded([&] { find(config)->attach(rank, *handle); });
}

const char* jaxcp_connected(const Config* config) {
  return guarded([&] { find(config)->connected(); });
}

const char* jaxcp_forget_name(const Config* config) {
  return guarded([&] { find(config)->forget_name(); });
}

const char* jaxcp_blank(const Config* config) {
  return guarded([&] {
    find(config)->blank();
    Registry::instance().forget_runs(config->exchange);
  });
}

// `text` receives a description of the first expired wait, or stays empty.
const char* jaxcp_expiry(const Config* config, char* text, uint64_t size) {
  return guarded([&] {
    const jaxcp::Expiry expiry = find(config)->expiry();
    if (expiry.expired) std::strncpy(text, jaxcp::describe(*config, expiry).c_str(), size - 1);
  });
}

const char* jaxcp_call(const Config* config, uint32_t* number) {
  return guarded([&] { *number = find(config)->call(); });
}

const char* jaxcp_set_call(const Config* config, uint32_t number) {
  return guarded([&] { find(config)->set_call(number); });
}

const char* jaxcp_launches(const Config* config, int64_t* count) {
  return guarded([&] { *count = find(config)->launches; });
}

const char* jaxcp_synchronize(const Config* config) {
  return guarded([&] { find(config)->synchronize(); });
}

const char* jaxcp_detach(const Config* config) {
  return guarded([&] { find(config)->detach(); });
}

const char* jaxcp_destroy(const Config* config) {
  return guarded([&] {
    Registry::instance().erase(config->exchange, config->device, config->rank);
    Registry::instance().forget_runs(config->exchange);
  });
}

}  // extern "C"
#pragma GCC visibility pop

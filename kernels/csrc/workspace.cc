#include "workspace.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "block.h"

namespace jaxcp {
namespace {

constexpr std::size_t kRunsRemembered = 256;  // executions in flight on one process are far fewer

}  // namespace

Workspace::Workspace(const Config& given)
    : config(given), by_rank_(static_cast<std::size_t>(given.cp)), imported_(static_cast<std::size_t>(given.cp)) {
  own_ = static_cast<std::uint8_t*>(memory::allocate(config.device, block::bytes(config), config.reach));
  by_rank_[static_cast<std::size_t>(config.rank)] = own_;
  try {
    status_ = static_cast<uint64_t*>(memory::allocate_mapped(config.device, sizeof(uint64_t), &status_on_device_));
    blank();
  } catch (...) {
    if (status_ != nullptr) memory::release_mapped(config.device, status_, sizeof(uint64_t));
    memory::release(config.device, own_, block::bytes(config), config.reach);
    throw;
  }
}

Workspace::~Workspace() {
  // Errors have nowhere to go from here: at worst the memory lives until the process ends.
  const auto quietly = [](auto action) {
    try {
      action();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "jaxcp: while freeing a workspace: %s\n", error.what());
    }
  };
  quietly([&] { at_rest(); });
  quietly([&] { unmap(); });
  quietly([&] { memory::release(config.device, own_, block::bytes(config), config.reach); });
  quietly([&] { memory::release_mapped(config.device, status_, sizeof(uint64_t)); });
}

void Workspace::attach(const std::shared_ptr<Workspace>& peer) {
  memory::enable_peer(config.device, peer->config.device);
  by_rank_[static_cast<std::size_t>(peer->config.rank)] = peer->own_;
  peers_.push_back(peer);
}

void Workspace::attach(int rank, const memory::Handle& handle) {
  auto* block =
      static_cast<std::uint8_t*>(memory::import_handle(config.device, handle, block::bytes(config), config.reach));
  by_rank_[static_cast<std::size_t>(rank)] = imported_[static_cast<std::size_t>(rank)] = block;
}

void Workspace::connected() { block::connect(config, own_, by_rank_); }

std::unique_lock<std::mutex> Workspace::at_rest() {
  std::unique_lock lock(running_mutex_);
  ended_.wait(lock, [&] { return running_ == 0; });  // bounded: every wait of a call is
  memory::synchronize(config.device);
  return lock;
}

void Workspace::synchronize() { at_rest(); }

void Workspace::detach() {
  const auto lock = at_rest();
  detached_ = true;
  unmap();
}

void Workspace::unmap() {
  for (std::uint8_t*& block : imported_) {
    if (block == nullptr) continue;
    memory::release_import(config.device, std::exchange(block, nullptr), block::bytes(config), config.reach);
  }
}

void Workspace::blank() {
  const auto lock = at_rest();
  block::blank(config, own_);
  std::atomic_ref(*status_).store(0, std::memory_order_release);
}

ExchangeParams Workspace::params(int64_t site) {
  ExchangeParams p{};
  p.heads = config.heads;
  p.heads_per_rank = config.heads_per_rank();
  p.dim = config.head_dim;
  p.dtype = static_cast<Dtype>(config.dtype);
  p.rank = config.rank;
  p.cp = config.cp;
  p.capacity = config.layout().capacity;
  p.timeout_ns = first_of(site) ? config.first_timeout_ns : config.timeout_ns;
  p.status = static_cast<uint64_t*>(status_on_device_);
  std::copy(by_rank_.begin(), by_rank_.end(), p.workspaces);
  return p;
}

uint32_t Workspace::call() {
  const auto lock = at_rest();
  return block::read_call(config, own_);
}

void Workspace::set_call(uint32_t number) {
  const auto lock = at_rest();
  block::write_call(config, own_, number);
}

bool Workspace::bind(const void* stream) {
  const void* bound = nullptr;
  return stream_.compare_exchange_strong(bound, stream) || bound == stream;
}

bool Workspace::first_of(int64_t site) {
  const std::lock_guard lock(mutex_);
  return sites_.insert(site).second;
}

Running::Running(std::shared_ptr<Workspace> workspace) : own_(std::move(workspace)) {
  bool closed = false;
  for (const std::weak_ptr<Workspace>& peer : own_->peers_) {
    peers_.push_back(peer.lock());
    closed |= peers_.back() == nullptr;
  }
  const std::lock_guard lock(own_->running_mutex_);
  if (closed || own_->detached_) throw std::runtime_error("exchange " + std::to_string(own_->config.exchange) + " is closed");
  ++own_->running_;
}

Running::~Running() {
  const std::lock_guard lock(own_->running_mutex_);
  if (--own_->running_ == 0) own_->ended_.notify_all();
}

Registry& Registry::instance() {
  // Never destroyed: at exit calls may still run, and CUDA may be gone, when static objects die. The process ends anyway.
  static Registry& registry = *new Registry;
  return registry;
}

void Registry::insert(std::shared_ptr<Workspace> workspace) {
  const std::lock_guard lock(mutex_);
  const Config& c = workspace->config;
  workspaces_[{c.exchange, c.device, c.rank}] = std::move(workspace);
}

std::shared_ptr<Workspace> Registry::find(int64_t exchange, int device, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = workspaces_.find({exchange, device, rank});
  if (found == workspaces_.end()) {
    throw std::runtime_error("exchange " + std::to_string(exchange) + " has no workspace for rank " + std::to_string(rank) +
                             " on device " + std::to_string(device));
  }
  return found->second;
}

std::vector<std::shared_ptr<Workspace>> Registry::on_device(int64_t exchange, int device) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Workspace>> found;
  for (auto it = workspaces_.lower_bound({exchange, device, 0}); it != workspaces_.end(); ++it) {
    const Config& c = it->second->config;
    if (c.exchange != exchange || c.device != device) break;
    found.push_back(it->second);
  }
  return found;
}

void Registry::erase(int64_t exchange, int device, int rank) {
  std::shared_ptr<Workspace> dying;  // freed after the lock: freeing waits for the device
  const std::lock_guard lock(mutex_);
  if (const auto found = workspaces_.find({exchange, device, rank}); found != workspaces_.end()) {
    dying = std::move(found->second);
    workspaces_.erase(found);
  }
}

std::optional<std::string> Registry::refusal(int64_t exchange, int64_t run) {
  const std::lock_guard lock(mutex_);
  std::deque<int64_t>& runs = admitted_[exchange];
  if (std::find(runs.rbegin(), runs.rend(), run) != runs.rend()) return std::nullopt;
  if (std::optional<std::string> why = first_expiry(exchange)) return why;
  runs.push_back(run);
  if (runs.size() > kRunsRemembered) runs.pop_front();
  return std::nullopt;
}

void Registry::forget_runs(int64_t exchange) {
  const std::lock_guard lock(mutex_);
  admitted_.erase(exchange);
}

std::optional<std::string> Registry::first_expiry(int64_t exchange) const {
  for (const auto& [key, workspace] : workspaces_) {
    if (std::get<0>(key) != exchange) continue;
    if (const Expiry expiry = workspace->expiry(); expiry.expired) return describe(workspace->config, expiry);
  }
  return std::nullopt;
}

std::string describe(const Config& config, const Expiry& expiry) {
  const auto seconds = [](uint64_t ns) { return static_cast<double>(ns) * 1e-9; };
  char text[384];
  if (expiry.peer == kForeign) {
    std::snprintf(text, sizeof text,
                  "TopologyError: exchange %lld: the program's mesh puts rank %d's device at place %d, the exchange's mesh at place %d. "
                  "Outputs on such devices are NaN. Build the Exchange with the program's mesh, or call reset() and use the exchange's.",
                  static_cast<long long>(config.exchange), config.rank, expiry.row, config.place);
    return text;
  }
  std::snprintf(text, sizeof text,
                "PeerTimeoutError: exchange %lld: rank %d waited longer than %.3g s (%.3g s in the first run of a call) for rank %d in "
                "call %u (row %d) and gave up. Outputs since then are NaN. Find out what became of rank %d, then call reset() on all ranks.",
                static_cast<long long>(config.exchange), config.rank, seconds(config.timeout_ns), seconds(config.first_timeout_ns),
                expiry.peer, expiry.call, expiry.row, expiry.peer);
  return text;
}

}  // namespace jaxcp

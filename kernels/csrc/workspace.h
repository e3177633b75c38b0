// One rank's workspace as the host knows it, and the table of those of this process.
//
// ONE ORDERED STREAM. The protocol's slots assume that a rank's calls run one after the other. XLA runs a device's
// executions, and launches their command buffers, on the device's one compute stream; a handler that is called under
// capture sees a trace stream on which nothing runs. So one workspace serves eager calls and replays: the first eager
// call binds it to its stream, a call on another stream is refused before anything is launched, and captures are let
// through because their graph will be launched on the bound stream. (PyTorch-style libraries, which capture and serve on
// streams of their own, need two workspaces.) Within one command buffer XLA may run independent calls as parallel
// branches; that is why jaxcp/exchange/order.py threads a token through all calls of a program.
//
// DEAD OR ALIVE, DECIDED ONCE PER EXECUTION. A call on a dead workspace could fail at once, but if only some devices of a
// running program failed, the others would wait for them in the program's next collective. So the first handler of an
// execution decides for the whole of it: an execution that began alive runs to its end (with NaN), and one that begins
// dead fails on every device.
//
// WHO KEEPS A BLOCK ALIVE. A GPU's calls end with its stream, which `synchronize` waits for. A call of the host twin runs on
// a thread of its own and writes into its peers' blocks, so it is counted while it runs (`Running`), and holds its own
// workspace and its peers' of this process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "memory.h"
#include "protocol.h"

namespace jaxcp {

// Plain data: Python fills it through ctypes (jaxcp/native/workspace_library.py, class Config).
struct Config {
  int64_t exchange;  // number of the exchange, the same on all ranks, never used twice in a process
  int32_t device;    // ordinal of the device, as XLA numbers those of this process
  int32_t place;     // of the device in the exchange's mesh, counted over all axes, the last one fastest
  int32_t rank, cp;
  int32_t heads, head_dim, max_tokens;
  int32_t dtype;             // enum Dtype
  memory::Reach reach;       // of the block: where its peers live
  uint64_t timeout_ns;
  uint64_t first_timeout_ns;  // for the first call of each call site: peers may still be compiling

  int heads_per_rank() const { return (heads + cp - 1) / cp; }
  Layout layout() const { return {cp, max_tokens * heads_per_rank(), head_dim * itemsize(static_cast<Dtype>(dtype))}; }
};

class Workspace {
 public:
  explicit Workspace(const Config& config);  // blank
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  memory::Handle handle() const { return memory::export_handle(config.device, own_, config.reach); }
  void attach(const std::shared_ptr<Workspace>& peer);        // of this process
  void attach(int rank, const memory::Handle& handle);        // of any process that the block's reach includes
  void forget_name() { memory::forget_name(config.device, own_); }
  void connected();    // all peers are attached
  void synchronize();  // waits for everything that was launched, on the device or on threads of the host
  void detach();       // unmaps what handles mapped; the workspace can only be destroyed then
  void blank();        // while no rank is in a call

  // What the workspace knows of a call; the handler adds its buffers.
  ExchangeParams params(int64_t site);

  Expiry expiry() const { return Expiry::unpacked(std::atomic_ref(*status_).load(std::memory_order_acquire)); }
  uint32_t call();                 // calls finished so far; waits for the device
  void set_call(uint32_t number);  // tests: calls near the wrap
  std::uint8_t* block() const { return own_; }

  // Binds to the first stream; false if `stream` is another one.
  bool bind(const void* stream);

  const Config config;
  std::atomic<int64_t> launches{0};  // handler calls; replays of a captured launch are not among them

 private:
  friend class Running;
  bool first_of(int64_t site);
  void unmap();
  std::unique_lock<std::mutex> at_rest();  // no call runs, and none begins while the lock is held

  std::uint8_t* own_ = nullptr;
  uint64_t* status_ = nullptr;
  void* status_on_device_ = nullptr;
  std::vector<std::uint8_t*> by_rank_;
  std::vector<std::uint8_t*> imported_;
  std::vector<std::weak_ptr<Workspace>> peers_;  // of this process
  std::mutex mutex_;
  std::unordered_set<int64_t> sites_;
  std::mutex running_mutex_;
  std::condition_variable ended_;
  int running_ = 0;
  bool detached_ = false;
  std::atomic<const void*> stream_{nullptr};
};

// One call of the host twin, from its begin to its end.
class Running {
 public:
  // Throws std::runtime_error if the exchange is being torn down: blocks are unmapped or freed already.
  explicit Running(std::shared_ptr<Workspace> workspace);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::shared_ptr<Workspace> own_;
  std::vector<std::shared_ptr<Workspace>> peers_;
};

// The workspaces of this process by (exchange, device, rank). A device has one rank of an exchange, or all of them
// where ranks are simulated on one GPU.
class Registry {
 public:
  static Registry& instance();

  void insert(std::shared_ptr<Workspace> workspace);
  std::shared_ptr<Workspace> find(int64_t exchange, int device, int rank) const;
  std::vector<std::shared_ptr<Workspace>> on_device(int64_t exchange, int device) const;
  void erase(int64_t exchange, int device, int rank);

  // Why execution `run` must not call `exchange`, or nothing: see the top of this file.
  std::optional<std::string> refusal(int64_t exchange, int64_t run);
  void forget_runs(int64_t exchange);

 private:
  std::optional<std::string> first_expiry(int64_t exchange) const;

  mutable std::mutex mutex_;
  std::map<std::tuple<int64_t, int, int>, std::shared_ptr<Workspace>> workspaces_;
  std::map<int64_t, std::deque<int64_t>> admitted_;  // executions that began alive, the newest ones
};

// "PeerTimeoutError: rank 2 waited 30 s for rank 5 ...", or "TopologyError: ..."
std::string describe(const Config& config, const Expiry& expiry);

}  // namespace jaxcp

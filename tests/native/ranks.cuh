// The ranks of an exchange simulated on one GPU: a workspace, a stream and buffers each, and a table of peers.
//
// The ranks' kernels must be on the device together. Each launch is capped at the rank's share of the blocks that fit,
// and CUDA_DEVICE_MAX_CONNECTIONS=32 gives each stream a queue of its own; main() sets it before CUDA starts. With more
// than 32 ranks, and under a sanitizer, which runs kernels one after the other, all ranks are one grid.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device_data.cuh"
#include "exchange.cuh"
#include "exchange.h"

namespace jaxcp::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CHECK(call) ::jaxcp::test::check((call), #call)

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected " + what);
}

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) { CHECK(cudaMalloc(&data_, count * sizeof(T))); }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t count_;
};

struct Shape {
  int cp, tokens, heads, dim;  // tokens: capacity
  Dtype dtype = Dtype::bfloat16;
  Base base = Base::two;
  int heads_per_rank() const { return (heads + cp - 1) / cp; }
  Layout layout() const { return {cp, tokens * heads_per_rank(), dim * itemsize(dtype)}; }
  int words16() const { return dim * itemsize(dtype) / 2; }  // of 16 bits per row
};

inline const Shape kUsual{8, 8, 64, 512};  // 8 ranks, 8 heads each

inline std::string name_of(Dtype dtype) {
  return dtype == Dtype::float32 ? "f32" : dtype == Dtype::float16 ? "f16" : "bf16";
}

inline std::string describe(const Shape& s, int tokens) {
  return "cp " + std::to_string(s.cp) + ", tokens " + std::to_string(tokens) + ", heads " + std::to_string(s.heads) +
         ", dim " + std::to_string(s.dim) + ", " + name_of(s.dtype) +
         (s.base == Base::two ? ", base 2" : ", base e");
}

inline double seconds(const std::function<void()>& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// All ranks as one grid: rank blockIdx.y.
template <class Variant>
__global__ void __launch_bounds__(kThreads, Variant::kBlocks)
    all_ranks_kernel(Plan plan, const ExchangeParams* params) {
  plan.rank = blockIdx.y;
  Variant(plan, params[blockIdx.y]).run();
}

// One stream per rank, shared by all exchanges of the program: more streams than connections would share queues.
inline const std::vector<cudaStream_t>& stream_pool() {
  static const std::vector<cudaStream_t> pool = [] {
    std::vector<cudaStream_t> streams(kMaxRanks);
    for (cudaStream_t& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return streams;
  }();
  return pool;
}

enum class Mode { streams, one_grid };
inline Mode default_mode(int cp) { return cp > 32 || std::getenv("JAXCP_ONE_GRID") ? Mode::one_grid : Mode::streams; }

class Ranks {
 public:
  const Shape shape;
  Mode mode;
  uint64_t timeout_ns = 2'000'000'000;
  bool with_lse = true;
  const std::vector<cudaStream_t>& streams;
  std::vector<Buffer<uint16_t>> o, out;  // 16-bit words, whatever the dtype
  std::vector<Buffer<float>> lse, out_lse;
  std::vector<Buffer<uint8_t>> workspaces;

  explicit Ranks(const Shape& s)
      : shape(s), mode(default_mode(s.cp)), streams(stream_pool()), all_(s.cp), counter_(1), verdict_(1) {
    const size_t rows = static_cast<size_t>(s.tokens) * s.heads, kept = s.layout().capacity;
    CHECK(cudaHostAlloc(&status_, s.cp * sizeof(uint64_t), cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&status_on_device_), status_, 0));
    for (int rank = 0; rank < s.cp; ++rank) {
      workspaces.emplace_back(s.layout().bytes());
      o.emplace_back(rows * s.words16());
      lse.emplace_back(rows);
      out.emplace_back(kept * s.words16());
      out_lse.emplace_back(kept);
    }
    CHECK(cudaMemset(counter_.get(), 0, counter_.bytes()));
    int resident = 0;
    CHECK(resident_blocks(params(0, 1), &resident));
    share_ = std::max(1, resident / s.cp);
    blank();
  }
  ~Ranks() {
    cudaDeviceSynchronize();
    cudaFreeHost(status_);
  }

  void blank() {
    for (int rank = 0; rank < shape.cp; ++rank) {
      status_[rank] = 0;
      CHECK(blank_workspace(workspaces[rank].get(), shape.layout(), streams[rank]));
    }
    wait();
  }
  void wait() const { CHECK(cudaDeviceSynchronize()); }

  ExchangeParams params(int rank, int tokens) const { return params(rank, tokens, *this); }
  // With the workspaces and status words of `owner`.
  ExchangeParams params(int rank, int tokens, const Ranks& owner) const {
    ExchangeParams p{};
    p.o = o[rank].get(), p.lse = lse[rank].get(), p.out = out[rank].get();
    p.out_lse = with_lse ? out_lse[rank].get() : nullptr;
    p.o_token_stride = int64_t{shape.heads} * shape.dim, p.o_head_stride = shape.dim;
    p.lse_token_stride = shape.heads, p.lse_head_stride = 1;
    p.tokens = tokens, p.heads = shape.heads, p.heads_per_rank = shape.heads_per_rank(), p.dim = shape.dim;
    p.dtype = shape.dtype, p.base = shape.base, p.rank = rank, p.cp = shape.cp, p.capacity = shape.layout().capacity;
    p.timeout_ns = timeout_ns;
    p.status = owner.status_on_device_ + rank;
    for (int peer = 0; peer < shape.cp; ++peer) p.workspaces[peer] = owner.workspaces[peer].get();
    p.grid_cap = share_;
    return p;
  }

  void launch(int rank, const ExchangeParams& p) const {
    if (const char* why = problem(p)) throw std::runtime_error(why);
    CHECK(launch_exchange(p, streams[rank]));
  }
  // One call of every rank.
  void call(int tokens) {
    std::vector<ExchangeParams> all;
    for (int rank = 0; rank < shape.cp; ++rank) all.push_back(params(rank, tokens));
    call(all);
  }
  void call(const std::vector<ExchangeParams>& all) {
    if (mode == Mode::one_grid) return call_as_one_grid(all);
    for (int rank = 0; rank < shape.cp; ++rank) launch(rank, all[rank]);
  }

  void fill(uint64_t seed, Fill fill = Fill::normal) {
    wait();
    for (int rank = 0; rank < shape.cp; ++rank) {
      fill_rows<<<shape.tokens * shape.heads, 128, 0, streams[rank]>>>(o[rank].get(), lse[rank].get(), shape.dim,
                                                                       shape.dtype, fill, seed, rank);
    }
    wait();
  }
  void poison() {
    wait();
    for (const auto& buffer : out) CHECK(cudaMemset(buffer.get(), 0x5A, buffer.bytes()));
    for (const auto& buffer : out_lse) CHECK(cudaMemset(buffer.get(), 0x5A, buffer.bytes()));
    wait();
  }

  // Throws unless all ranks' outputs are the float64 merge of the inputs.
  void judge(int tokens, const std::string& what) { judge(tokens, what, out); }
  void judge(int tokens, const std::string& what, const std::vector<Buffer<uint16_t>>& outputs) {
    wait();
    Inputs in{};
    for (int rank = 0; rank < shape.cp; ++rank) in.o[rank] = o[rank].get(), in.lse[rank] = lse[rank].get();
    CHECK(cudaMemset(verdict_.get(), 0, sizeof(Judgement)));
    for (int rank = 0; rank < shape.cp; ++rank) {
      judge_rows<<<tokens * shape.heads_per_rank(), 128>>>(
          in, outputs[rank].get(), with_lse && &outputs == &out ? out_lse[rank].get() : nullptr, shape.cp, shape.heads,
          shape.heads_per_rank(), shape.dim, shape.dtype, shape.base, rank, verdict_.get());
    }
    Judgement verdict;
    CHECK(cudaMemcpy(&verdict, verdict_.get(), sizeof verdict, cudaMemcpyDeviceToHost));
    expect(verdict.wrong == 0, what + ": " + std::to_string(verdict.wrong) + " wrong elements, one off by " +
                                   std::to_string(verdict.worst) + " tolerances");
    for (int rank = 0; rank < shape.cp; ++rank) expect(!expiry(rank).expired, what + ": no expired wait");
  }

  // Outputs of a call of `tokens`, copied, and the number of words that differ from such a copy.
  std::vector<Buffer<uint16_t>> copy_of_outputs() {
    wait();
    std::vector<Buffer<uint16_t>> copy;
    for (const auto& buffer : out) {
      copy.emplace_back(buffer.bytes() / 2);
      CHECK(cudaMemcpy(copy.back().get(), buffer.get(), buffer.bytes(), cudaMemcpyDeviceToDevice));
    }
    return copy;
  }
  // In stream order, without waiting; differences() reads the count.
  void compare(int tokens, const std::vector<Buffer<uint16_t>>& expected) {
    const int64_t words = int64_t{tokens} * shape.heads_per_rank() * shape.words16() / 2;
    for (int rank = 0; rank < shape.cp; ++rank) {
      count_differences<<<64, 256, 0, streams[rank]>>>(reinterpret_cast<uint32_t*>(out[rank].get()),
                                                       reinterpret_cast<uint32_t*>(expected[rank].get()), words,
                                                       counter_.get());
    }
  }
  unsigned long long differences() {
    wait();
    unsigned long long count;
    CHECK(cudaMemcpy(&count, counter_.get(), sizeof count, cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(counter_.get(), 0, sizeof count));
    return count;
  }

  Expiry expiry(int rank) const { return Expiry::unpacked(*static_cast<volatile uint64_t*>(status_ + rank)); }
  uint32_t call_number(int rank) const {
    uint64_t word;
    CHECK(cudaMemcpy(&word, workspaces[rank].get(), sizeof word, cudaMemcpyDeviceToHost));
    return call_of(word);
  }
  void set_call_number(uint32_t call) {
    wait();
    const uint64_t word = first_of_call(call);
    for (const auto& workspace : workspaces)
      CHECK(cudaMemcpy(workspace.get(), &word, sizeof word, cudaMemcpyHostToDevice));
    wait();
  }

 private:
  void call_as_one_grid(const std::vector<ExchangeParams>& all) {
    CHECK(cudaMemcpyAsync(all_.get(), all.data(), all.size() * sizeof(ExchangeParams), cudaMemcpyHostToDevice,
                          streams[0]));
    const int blocks = std::min(all[0].grid_cap, useful_blocks(all[0]));
    device::with_variant(shape.dtype, shape.cp, shape.layout().row_bytes, [&](auto variant) {
      all_ranks_kernel<typename decltype(variant)::type>
          <<<dim3(blocks, shape.cp), kThreads, 0, streams[0]>>>(Plan::of(all[0], blocks), all_.get());
    });
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(streams[0]));
  }

  uint64_t *status_ = nullptr, *status_on_device_ = nullptr;
  int share_ = 0;  // blocks of a launch
  Buffer<ExchangeParams> all_;
  Buffer<unsigned long long> counter_;
  Buffer<Judgement> verdict_;
};

}  // namespace jaxcp::test

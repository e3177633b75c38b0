// A selection problem with a paged pool of keys, made on the host so that every score is an exact sum, and its answer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "qsa/select.h"

namespace jaxcp::test {

using qsa::Method;
using qsa::SelectParams;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CHECK(call) check(call, #call)

template <class T>
class Device {
 public:
  explicit Device(size_t count) : count_(count) { CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T))); }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    CHECK(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  T* get() const { return data_; }
  void fill(int byte) { CHECK(cudaMemset(data_, byte, count_ * sizeof(T))); }
  std::vector<T> host() const {
    std::vector<T> out(count_);
    CHECK(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Ids of the k largest of the first `visible` scores >= +0, ascending, ties to smaller ids; -1 behind. As bits: NaN
// above infinity.
inline std::vector<int32_t> answer(const float* scores, int32_t visible, int32_t k) {
  std::vector<int32_t> ids(static_cast<size_t>(std::max(visible, 0)));
  std::iota(ids.begin(), ids.end(), 0);
  const auto key = [&](int32_t id) { return std::bit_cast<uint32_t>(scores[id]); };
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  ids.resize(std::min<size_t>(ids.size(), k));
  std::sort(ids.begin(), ids.end());
  ids.resize(static_cast<size_t>(k), -1);
  return ids;
}

struct Sizes {
  int heads = 4, dim = 128, k = 512, ratio = 4, page_blocks = 16, requests = 3, blocks = 2000;
  bool e4m3 = false;
};

// Requests with `blocks` keys each in shuffled pages of layer 1 of 2; rows of chosen requests and positions.
struct Problem {
  Sizes sizes;
  std::vector<float> keys;     // [requests, blocks, dim]
  std::vector<float> queries;  // [rows, heads, dim]
  std::vector<int32_t> request, position;
  int longest = 64;

  int rows() const { return static_cast<int>(request.size()); }
  int request_pages() const { return (sizes.blocks + sizes.page_blocks - 1) / sizes.page_blocks; }
  int visible(int row) const { return std::min((position[row] + 1) / sizes.ratio, sizes.blocks); }

  std::vector<float> scores(int row) const {
    std::vector<float> out(static_cast<size_t>(sizes.blocks));
    const float scale = static_cast<float>(std::pow(sizes.dim, -0.5));
    for (int n = 0; n < visible(row); ++n) {
      const float* key = &keys[(size_t{0} + request[row] * sizes.blocks + n) * sizes.dim];
      float total = 0;
      for (int h = 0; h < sizes.heads; ++h) {
        const float* q = &queries[(size_t{0} + row * sizes.heads + h) * sizes.dim];
        double dot = 0;
        for (int d = 0; d < sizes.dim; ++d) dot += double{q[d]} * key[d];
        total += std::max(static_cast<float>(dot), 0.0f);
      }
      out[n] = total * scale;
    }
    return out;
  }

  // [rows, k]
  std::vector<int32_t> answers() const {
    std::vector<int32_t> out(static_cast<size_t>(rows()) * sizes.k);
    std::vector<std::thread> threads;
    const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        for (int row = t; row < rows(); row += count) {
          const std::vector<int32_t> ids = answer(scores(row).data(), visible(row), sizes.k);
          std::copy(ids.begin(), ids.end(), &out[size_t{1} * row * sizes.k]);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return out;
  }
};

// A problem on the device, and runs of it.
class Run {
 public:
  explicit Run(const Problem& problem)
      : problem_(problem),
        queries_(narrowed(problem.queries)),
        pool_(pool(problem)),
        layer_(std::vector<int32_t>{1}),
        table_(table(problem)),
        request_(problem.request),
        position_(problem.position),
        ids_(static_cast<size_t>(problem.rows()) * problem.sizes.k) {}

  std::vector<int32_t> ids(Method method, int64_t scratch_bytes) {
    Device<uint8_t> scratch(static_cast<size_t>(scratch_bytes));
    scratch.fill(0xFF);
    ids_.fill(0x55);
    SelectParams p = params(method);
    p.scratch = scratch.get(), p.scratch_bytes = scratch_bytes;
    if (const char* why = qsa::problem(p)) throw std::runtime_error(why);
    CHECK(qsa::launch_select(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    return ids_.host();
  }

  // Throws unless every row's ids are these.
  void judge(const std::vector<int32_t>& want, Method method, int64_t scratch_bytes, const std::string& what) {
    const std::vector<int32_t> got = ids(method, scratch_bytes);
    const auto [one, other] = std::mismatch(got.begin(), got.end(), want.begin());
    if (one == got.end()) return;
    const auto at = static_cast<int>(one - got.begin()), k = problem_.sizes.k;
    throw std::runtime_error(what + ": row " + std::to_string(at / k) + " of " +
                             std::to_string(problem_.visible(at / k)) + " blocks, place " + std::to_string(at % k) +
                             ": " + std::to_string(*one) + " instead of " + std::to_string(*other));
  }

 private:
  SelectParams params(Method method) const {
    const Sizes& s = problem_.sizes;
    SelectParams p{};
    p.index_q = queries_.get(), p.pool = pool_.get(), p.layer = layer_.get(), p.page_table = table_.get();
    p.request = request_.get(), p.position = position_.get(), p.ids = ids_.get();
    p.rows = problem_.rows(), p.heads = s.heads, p.dim = s.dim, p.k = s.k;
    p.layers = 2, p.pages = pages(problem_), p.page_blocks = s.page_blocks;
    p.requests = s.requests, p.request_pages = problem_.request_pages();
    p.ratio = s.ratio, p.blocks = s.blocks, p.longest = problem_.longest, p.e4m3 = s.e4m3, p.method = method;
    return p;
  }
  static int pages(const Problem& p) { return 1 + p.sizes.requests * p.request_pages(); }
  static uint16_t bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  static std::vector<uint16_t> narrowed(const std::vector<float>& x) {
    std::vector<uint16_t> out(x.size());
    std::transform(x.begin(), x.end(), out.begin(), bf16);
    return out;
  }
  static std::vector<int32_t> table(const Problem& p) {
    std::vector<int32_t> pages(static_cast<size_t>(p.sizes.requests) * p.request_pages());
    std::iota(pages.begin(), pages.end(), 1);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    return pages;
  }
  // What is not a key of the requests is NaN.
  static std::vector<uint8_t> pool(const Problem& p) {
    const Sizes& s = p.sizes;
    const size_t item = s.e4m3 ? 1 : 2, layer = size_t{1} * pages(p) * s.page_blocks * s.dim * item;
    std::vector<uint8_t> out(2 * layer, 0xFF);
    const std::vector<int32_t> pages_of = table(p);
    for (int r = 0; r < s.requests; ++r) {
      for (int n = 0; n < s.blocks; ++n) {
        const size_t page = pages_of[size_t{0} + r * p.request_pages() + n / s.page_blocks];
        uint8_t* to = &out[layer + (page * s.page_blocks + n % s.page_blocks) * s.dim * item];
        for (int d = 0; d < s.dim; ++d) {
          const float x = p.keys[(size_t{0} + r * s.blocks + n) * s.dim + d];
          const uint16_t bits = s.e4m3 ? __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3) : bf16(x);
          for (size_t b = 0; b < item; ++b) to[d * item + b] = static_cast<uint8_t>(bits >> 8 * b);
        }
      }
    }
    return out;
  }

  const Problem& problem_;
  Device<uint16_t> queries_;
  Device<uint8_t> pool_;
  Device<int32_t> layer_, table_, request_, position_, ids_;
};

}  // namespace jaxcp::test

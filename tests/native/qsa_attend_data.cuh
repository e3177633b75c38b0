// Inputs of sparse attention made on the device, and a float64 attention that judges its results there: a thread block
// per row and head, straight from the definition, independent of the kernels' code.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "qsa/attend.h"

namespace jaxcp::qsa::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CHECK(call) ::jaxcp::qsa::test::check((call), #call)

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t size = 0) : size_(size) {
    if (size) CHECK(cudaMalloc(&data_, size * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    CHECK(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyDefault));
  }
  Buffer(Buffer&& other) noexcept { std::swap(data_, other.data_), std::swap(size_, other.size_); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_), std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return size_; }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    CHECK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDefault));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

__host__ __device__ inline uint32_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(x >> 31);
}
__host__ __device__ inline uint32_t hashed(uint64_t seed, uint64_t a, uint64_t b) {
  return mixed(seed * 0x9E3779B97F4A7C15ull + a * 0xD1342543DE82EF95ull + b);
}

// How rows choose blocks. Models of neighbouring rows: runs of 32 rows share uniform scores, each adds uniform noise up
// to `noise` of them; `random` is noise alone. `same`: no noise. `half`: every other block by noise alone. `disjoint`:
// row r prefers blocks n with n mod 8 = r mod 8.
enum class Choice { random, same, shared, drift, loose, half, disjoint };
inline const char* name(Choice choice) {
  const char* names[] = {"random", "same", "shared", "drift", "loose", "half", "disjoint"};
  return names[static_cast<int>(choice)];
}
__device__ inline uint32_t score(Choice choice, uint64_t seed, int row, int block) {
  const uint32_t base = hashed(seed, 1'000'000 + row / 32, block) >> 8, noise = hashed(seed, row, block) >> 8;
  switch (choice) {
    case Choice::random:
      return noise;
    case Choice::same:
      return base;
    case Choice::shared:
      return base + noise / 20;
    case Choice::drift:
      return base + noise / 100 * 15;
    case Choice::loose:
      return base + noise / 2;
    case Choice::half:
      return block % 2 ? base : noise;
    case Choice::disjoint:
      return (noise >> 1) + (block % 8 == row % 8 ? 1u << 24 : 0);
  }
  return 0;
}

// The `width` blocks of largest score of each row (or all it sees), ascending, -1 behind. A block of 256 threads per
// row.
__global__ void choose(Choice choice, uint64_t seed, const int32_t* position, int ratio, int width, int32_t* ids) {
  __shared__ int count;
  const int row = blockIdx.x, visible = (position[row] + 1) / ratio, wanted = min(width, visible);
  const auto count_from = [&](uint32_t least) {
    __syncthreads();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    int mine = 0;
    for (int n = threadIdx.x; n < visible; n += blockDim.x) mine += score(choice, seed, row, n) >= least;
    atomicAdd(&count, mine);
    __syncthreads();
    return count;
  };
  uint32_t least = 0;  // largest threshold that leaves at least `wanted`
  for (int bit = 26; bit >= 0; --bit) {
    if (count_from(least | 1u << bit) >= wanted) least |= 1u << bit;
  }
  const int above = count_from(least + 1);
  if (threadIdx.x != 0) return;
  int at = 0, ties = wanted - above;
  for (int n = 0; n < visible && at < wanted; ++n) {
    const uint32_t s = score(choice, seed, row, n);
    if (s > least || (s == least && ties-- > 0)) ids[int64_t{row} * width + at++] = n;
  }
  for (; at < width; ++at) ids[int64_t{row} * width + at] = -1;
}

__global__ void fill_rows(__nv_bfloat16* rows, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float u = static_cast<int32_t>(hashed(seed, 7, i)) * 0x1p-31f,
                w = static_cast<int32_t>(hashed(seed, 8, i)) * 0x1p-31f;
    rows[i] = __float2bfloat16(scale * (u + w));
  }
}

// Values for the tokens that requests hold in one layer; everything else keeps what it has.
__global__ void fill_pool(__nv_bfloat16* pool, const int32_t* table, int table_width, const int32_t* length,
                          int page_size, int64_t row, int64_t layer_offset, uint64_t seed) {
  const int request = blockIdx.y, token = blockIdx.x;
  if (token >= length[request]) return;
  const int64_t place = int64_t{table[request * table_width + token / page_size]} * page_size + token % page_size;
  for (int64_t i = threadIdx.x; i < row; i += blockDim.x) {
    const float u = static_cast<int32_t>(hashed(seed, place, i)) * 0x1p-31f,
                w = static_cast<int32_t>(hashed(seed + 1, place, i)) * 0x1p-31f;
    pool[layer_offset + place * row + i] = __float2bfloat16(1.2f * (u + w));
  }
}

struct Verdict {
  unsigned long long wrong;
  int row, head;
  double error, tolerance;
};

// Judges row `first + blockIdx.x * every`, head blockIdx.y. Scores of at most `capacity` tokens fit in shared memory.
__global__ void judge(AttendParams p, int every, Verdict* verdict) {
  extern __shared__ double scores[];
  __shared__ double sums[256];
  const int64_t row = int64_t{blockIdx.x} * every;
  const int head = blockIdx.y, kv = head / p.group(), position = p.position[row];
  const int32_t* ids = p.blocks + row * p.width;
  int chosen = 0;
  while (chosen < p.width && ids[chosen] >= 0) ++chosen;
  const int tail = position < 0 ? 0 : (position + 1) % p.ratio, count = position < 0 ? 0 : chosen * p.ratio + tail;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + (row * p.heads + head) * p.dim;
  const auto at = [&](int i) {
    const int token =
        i < chosen * p.ratio ? ids[i / p.ratio] * p.ratio + i % p.ratio : position + 1 - tail + i - chosen * p.ratio;
    const int page = p.page_table[int64_t{p.request[row]} * p.table_width + token / p.page_size];
    return (((*p.layer * p.pages + page) * p.page_size + token % p.page_size) * p.kv_heads + kv) * p.dim;
  };
  const auto total = [&](double x, bool largest) {
    sums[threadIdx.x] = x;
    __syncthreads();
    double all = sums[0];
    for (int i = 1; i < blockDim.x; ++i) all = largest ? fmax(all, sums[i]) : all + sums[i];
    __syncthreads();
    return all;
  };
  double top = -INFINITY;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const auto* k = static_cast<const __nv_bfloat16*>(p.k) + at(i);
    double s = 0;
    for (int d = 0; d < p.dim; ++d) {
      s += double(__bfloat162float(__float2bfloat16(__bfloat162float(q[d]) * p.scale_log2e))) *
           double(__bfloat162float(k[d]));
    }
    scores[i] = s;
    top = fmax(top, s);
  }
  top = total(top, true);
  if (count == 0) top = 0;
  double weight = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) weight += scores[i] = exp2(scores[i] - top);
  weight = total(weight, false);
  const auto report = [&](double error, double tolerance) {
    if (error <= tolerance) return;
    if (atomicAdd(&verdict->wrong, 1ull) == 0) {
      verdict->row = row, verdict->head = head, verdict->error = error, verdict->tolerance = tolerance;
    }
  };
  for (int d = threadIdx.x; d < p.dim; d += blockDim.x) {
    double sum = 0, magnitude = 0;
    for (int i = 0; i < count; ++i) {
      const double v = __bfloat162float(static_cast<const __nv_bfloat16*>(p.v)[at(i) + d]);
      sum += scores[i] * v, magnitude += scores[i] * fabs(v);
    }
    if (count > 0) sum /= weight, magnitude /= weight;
    const double got = __bfloat162float(static_cast<const __nv_bfloat16*>(p.o)[(row * p.heads + head) * p.dim + d]);
    const double tolerance = 0x1p-8 * (fabs(sum) + 1.01 * magnitude);  // roundings of output and probabilities
    report(isnan(got) ? INFINITY : fabs(got - sum), tolerance);
  }
  if (threadIdx.x != 0) return;
  const double got = p.lse[row * p.heads + head], expected = count > 0 ? top + log2(weight) : -INFINITY;
  // fp32 sums of `dim` products: far below a token's share of the normaliser, so no token is missed or too many.
  report(count == 0   ? (got == -INFINITY ? 0 : 1)
         : isnan(got) ? INFINITY
                      : fabs(got - expected),
         count == 0 ? 0.5 : 5e-5);
}

__global__ void count_differences(const uint32_t* a, const uint32_t* b, int64_t words,
                                  unsigned long long* differences) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(differences, 1ull);
  }
}

// Rows `count` of a request from position `prefix` on; then `padding` rows that belong to nobody.
struct Run {
  int request, prefix, count, padding = 0;
};

struct Setup {
  std::vector<Run> runs;
  int heads = 24, kv_heads = 2, dim = 256, width = 512, ratio = 4, page_size = 64;
  Choice choice = Choice::random;
  uint64_t seed = 1;
  int layers = 2, layer = 1;
};

// A problem on the device. Everything that no row may attend to is NaN: the other layer, page 0, tokens behind a
// request.
class Problem {
 public:
  explicit Problem(const Setup& setup) : setup(setup) {
    std::vector<int32_t> request, position, length;
    for (const Run& run : setup.runs) {
      for (int i = 0; i < run.count + run.padding; ++i) {
        request.push_back(run.request), position.push_back(i < run.count ? run.prefix + i : -1);
      }
      if (static_cast<int>(length.size()) <= run.request) length.resize(run.request + 1);
      length[run.request] = std::max(length[run.request], run.prefix + run.count);
    }
    int longest = 1;
    for (const int n : length) longest = std::max(longest, n);
    const int width = (longest + setup.page_size - 1) / setup.page_size, requests = static_cast<int>(length.size());
    std::vector<int32_t> pages(requests * width);
    std::iota(pages.begin(), pages.end(), 1);
    for (size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[hashed(setup.seed, 3, i) % i]);
    p.rows = request.size(), p.layers = setup.layers, p.pages = 1 + pages.size();
    p.requests = requests, p.table_width = width, p.heads = setup.heads, p.kv_heads = setup.kv_heads, p.dim = setup.dim;
    p.width = setup.width, p.page_size = setup.page_size, p.ratio = setup.ratio;
    p.scale_log2e = static_cast<float>(1.4426950408889634 / std::sqrt(double(setup.dim)));
    request_ = Buffer<int32_t>(request), position_ = Buffer<int32_t>(position), table_ = Buffer<int32_t>(pages);
    layer_ = Buffer<int32_t>(std::vector<int32_t>{setup.layer});
    ids_ = Buffer<int32_t>(p.rows * p.width);
    choose<<<static_cast<unsigned>(p.rows), 256>>>(setup.choice, setup.seed, position_.get(), p.ratio, p.width,
                                                   ids_.get());
    const int64_t row = int64_t{p.kv_heads} * p.dim, layer = p.pages * p.page_size * row;
    q_ = Buffer<__nv_bfloat16>(p.rows * p.heads * p.dim), o_ = Buffer<__nv_bfloat16>(q_.size());
    lse_ = Buffer<float>(p.rows * p.heads);
    fill_rows<<<1024, 256>>>(q_.get(), q_.size(), setup.seed, 2.5f);
    const Buffer<int32_t> lengths(length);
    for (auto* pool : {&k_, &v_}) {
      *pool = Buffer<__nv_bfloat16>(p.layers * layer);
      CHECK(cudaMemset(pool->get(), 0xFF, pool->size() * 2));
      fill_pool<<<dim3(longest, requests), 128>>>(pool->get(), table_.get(), width, lengths.get(), p.page_size, row,
                                                  layer * setup.layer, setup.seed + (pool == &k_ ? 11 : 13));
    }
    CHECK(cudaDeviceSynchronize());
    p.q = q_.get(), p.k = k_.get(), p.v = v_.get(), p.o = o_.get(), p.lse = lse_.get();
    p.blocks = ids_.get(), p.request = request_.get(), p.position = position_.get();
    p.page_table = table_.get(), p.layer = layer_.get();
    configure(std::max(1, std::min(kMostRows, kTileHeads / p.group())), 1, p.rows);
  }

  // Rows per tile, parts of a list, rows at a time.
  void configure(int tile_rows, int splits, int64_t slice) {
    p.tile_rows = tile_rows, p.splits = splits;
    p.slice = std::max<int64_t>(1, (slice + tile_rows - 1) / tile_rows) * tile_rows;
    p.scratch_size = scratch_words(p);
    scratch_ = Buffer<int32_t>(p.scratch_size);
    p.scratch = scratch_.get();
    if (const char* why = problem(p)) throw std::runtime_error(why);
  }

  void poison() {
    CHECK(cudaMemset(o_.get(), 0xFF, o_.size() * 2));
    CHECK(cudaMemset(lse_.get(), 0xFF, lse_.size() * 4));
    CHECK(cudaMemset(scratch_.get(), 0xFF, scratch_.size() * 4));
  }

  // Throws unless every `every`-th row is right.
  void judge_results(const std::string& what, int every = 1) const {
    const Buffer<Verdict> verdict(std::vector<Verdict>(1));
    const int bytes = (p.width * p.ratio + p.ratio) * 8;
    CHECK(cudaFuncSetAttribute(judge, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    judge<<<dim3(static_cast<unsigned>((p.rows + every - 1) / every), p.heads), 256, bytes>>>(p, every, verdict.get());
    CHECK(cudaGetLastError());
    const Verdict v = verdict.host()[0];
    if (v.wrong == 0) return;
    throw std::runtime_error(what + ": " + std::to_string(v.wrong) + " wrong numbers, e.g. row " +
                             std::to_string(v.row) + " head " + std::to_string(v.head) + ": error " +
                             std::to_string(v.error) + ", tolerance " + std::to_string(v.tolerance));
  }

  // Complete blocks and tails of all tiles, from the lists of the last slice.
  std::pair<int64_t, int64_t> listed() const {
    const auto words = scratch_.host();
    int64_t complete = 0, tails = 0;
    const int64_t rows = p.rows % p.slice == 0 ? std::min(p.rows, p.slice) : p.rows % p.slice;
    for (int64_t tile = 0; tile * p.tile_rows < rows; ++tile) {
      complete += words[tile * p.list_words()], tails += words[tile * p.list_words() + 1];
    }
    return {complete, tails};
  }

  const Setup setup;
  AttendParams p{};
  Buffer<__nv_bfloat16> o_;
  Buffer<float> lse_;

 private:
  Buffer<int32_t> request_, position_, table_, layer_, ids_, scratch_;
  Buffer<__nv_bfloat16> q_, k_, v_;
};

}  // namespace jaxcp::qsa::test

// The GPU's side of select_cut.h: lanes of a warp, threads of a block.
#pragma once

#include "qsa/select_cut.h"

namespace jaxcp::qsa {

struct Warp {
  static constexpr uint32_t kAll = 0xFFFFFFFFu;
  uint32_t lane = threadIdx.x % 32;

  __device__ int32_t sum(int32_t x) const { return __reduce_add_sync(kAll, x); }
  __device__ int32_t max(int32_t x) const { return __reduce_max_sync(kAll, x); }
  __device__ uint32_t max(uint32_t x) const { return __reduce_max_sync(kAll, x); }
  __device__ uint32_t min(uint32_t x) const { return __reduce_min_sync(kAll, x); }
  __device__ uint32_t ballot(bool x) const { return __ballot_sync(kAll, x); }
  __device__ int32_t count_before(uint32_t votes) const { return __popc(votes & ((1u << lane) - 1)); }
};

struct Found {
  uint32_t digit;
  int32_t above, inside;
};

template <int kThreads>
struct Block {
  static constexpr int kWarps = kThreads / 32, kMine = Range::kDigits / kThreads;
  static_assert(kWarps <= 32 && kMine * kThreads == Range::kDigits && kMine <= 4);

  struct Shared {
    alignas(16) uint32_t bins[Range::kDigits];
    uint32_t first[kWarps], second[kWarps];
    Found found;
  };

  Shared& shared;
  Warp warp;
  int thread = static_cast<int>(threadIdx.x);

  // f of every key of a row, in any order. `scores` is aligned to 16 bytes and readable up to a multiple of 4.
  template <class F>
  __device__ void each(const uint32_t* scores, int32_t n, F f) const {
#pragma unroll 4
    for (int32_t i = thread * 4; i < n; i += kThreads * 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(scores + i));
      f(order_key(x.x));
      if (i + 1 < n) f(order_key(x.y));
      if (i + 2 < n) f(order_key(x.z));
      if (i + 3 < n) f(order_key(x.w));
    }
  }

  __device__ void extremes(uint32_t& least, uint32_t& most) {
    least = warp.min(least), most = warp.max(most);
    if (warp.lane == 0) shared.first[thread / 32] = least, shared.second[thread / 32] = most;
    __syncthreads();
    const bool mine = warp.lane < kWarps;
    least = warp.min(mine ? shared.first[warp.lane] : 0xFFFFFFFFu);
    most = warp.max(mine ? shared.second[warp.lane] : 0u);
  }

  __device__ void clear_bins() {
    __syncthreads();  // the last bins and sums have been read
    for (int i = thread; i < Range::kDigits; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
  }
  __device__ void count(uint32_t digit) { atomicAdd(&shared.bins[digit], 1u); }

  // The digit of the wanted-th largest key counted.
  __device__ Found find(int32_t wanted) {
    __syncthreads();
    const uint32_t top = Range::kDigits - 1 - thread * kMine;  // this thread's bins: from here down
    int32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += shared.bins[top - i];
    int32_t above = sum_before(mine, shared.first);
    if (above < wanted && wanted <= above + mine) {
      uint32_t digit = top;
      while (above + static_cast<int32_t>(shared.bins[digit]) < wanted) above += shared.bins[digit--];
      shared.found = {digit, above, static_cast<int32_t>(shared.bins[digit])};
    }
    __syncthreads();
    return shared.found;
  }

  // Sum of x over the threads before this one.
  __device__ int32_t sum_before(int32_t x, uint32_t* sums) {
    int32_t upto = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(Warp::kAll, upto, step);
      if (static_cast<int>(warp.lane) >= step) upto += other;
    }
    if (warp.lane == 31) sums[thread / 32] = upto;
    __syncthreads();
    return upto - x + before_warp(sums);
  }
  // Sum of what the warps before this one have left in `sums`.
  __device__ int32_t before_warp(const uint32_t* sums) const {
    const bool before = static_cast<int>(warp.lane) < thread / 32;
    return warp.sum(before ? static_cast<int32_t>(sums[warp.lane]) : 0);
  }
};

}  // namespace jaxcp::qsa

// The GPU's teams of select_cut.h: lanes of a warp over keys in registers, threads of a block over scores in memory.
#pragma once

#include "qsa/select_cut.h"

namespace jaxcp::qsa {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

struct Warp {
  static constexpr uint32_t kAll = 0xFFFFFFFFu;
  uint32_t lane = threadIdx.x % 32;

  __device__ int32_t sum(int32_t x) const { return __reduce_add_sync(kAll, x); }
  __device__ int32_t max(int32_t x) const { return __reduce_max_sync(kAll, x); }
  __device__ uint32_t max(uint32_t x) const { return __reduce_max_sync(kAll, x); }
  __device__ uint32_t min(uint32_t x) const { return __reduce_min_sync(kAll, x); }
  __device__ uint32_t ballot(bool x) const { return __ballot_sync(kAll, x); }
  __device__ int32_t count_before(uint32_t votes) const { return __popc(votes & ((1u << lane) - 1)); }
  // Sum of x over the lanes up to this one.
  __device__ int32_t sum_upto(int32_t x) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, x, step);
      if (static_cast<int>(lane) >= step) x += other;
    }
    return x;
  }
};

// The digit among kMine bins from `top` down, `above` keys being above them, that holds the wanted-th largest key.
template <int kMine>
__device__ __forceinline__ Found find_among(const uint32_t* bins, uint32_t top, int32_t above, int32_t wanted) {
  Found found{top, above, static_cast<int32_t>(bins[top])};
#pragma unroll
  for (int i = 1; i < kMine; ++i) {
    if (found.above + found.inside < wanted)
      found = {top - i, found.above + found.inside, static_cast<int32_t>(bins[top - i])};
  }
  return found;
}

// A warp over keys in its registers: not negative as integers, absent ones -1.
template <int kPerLane>
struct Lanes {
  static constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kMine = kDigits / 32;

  const int32_t (&key)[kPerLane];
  uint32_t* bins;  // kDigits, of shared memory
  Warp warp;

  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) f(static_cast<uint32_t>(key[j]));
  }
  __device__ Range range(int32_t wanted) const {
    uint32_t least = 0xFFFFFFFFu;
    int32_t most = -1;
    each([&](uint32_t k) { least = min(least, k), most = max(most, static_cast<int32_t>(k)); });
    return {warp.min(least), static_cast<uint32_t>(warp.max(most)), wanted};
  }
  __device__ void clear_bins() {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMine; i += 4) *reinterpret_cast<uint4*>(bins + 4 * warp.lane + 32 * i) = uint4{};
    __syncwarp();
  }
  __device__ void count_if(bool condition, uint32_t digit) const {
    const uint32_t bin = shared_address(bins) + 4 * digit;
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %0, 0; @p red.shared.add.u32 [%1], 1;}" ::"r"(static_cast<uint32_t>(condition)),
        "r"(bin)
        : "memory");
  }
  __device__ Found find(int32_t wanted) const {
    __syncwarp();
    const uint32_t top = kDigits - 1 - warp.lane * kMine;
    int32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += bins[top - i];
    const int32_t upto = warp.sum_upto(mine);
    const int owner = __ffs(static_cast<int>(warp.ballot(upto >= wanted))) - 1;
    const Found found = find_among<kMine>(bins, top, upto - mine, wanted);
    return {__shfl_sync(Warp::kAll, found.digit, owner), __shfl_sync(Warp::kAll, found.above, owner),
            __shfl_sync(Warp::kAll, found.inside, owner)};
  }
};

// A row's keys, a thread's share of them: the bits of n scores, none of them negative, in memory aligned to 16 bytes.
// Each warp has a contiguous part of the row, the parts in order.
template <int kThreads>
struct InMemory {
  const uint32_t* scores;
  int32_t n, begin, end;  // of the warp's part

  __device__ InMemory(const uint32_t* scores, int32_t n) : scores(scores), n(n) {
    constexpr int32_t kWarps = kThreads / 32;
    const int32_t part = ((n + kWarps - 1) / kWarps + 127) / 128 * 128;
    begin = min(static_cast<int32_t>(threadIdx.x / 32) * part, n), end = min(begin + part, n);
  }
  // f(group, key) of every key; a thread's are in four groups.
  template <class F>
  __device__ void groups(F f) const {
    const int32_t whole = n / 4, thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll 4
    for (int32_t i = thread; i < whole; i += kThreads) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(scores) + i);
      f(0, x.x), f(1, x.y), f(2, x.z), f(3, x.w);
    }
    if (thread < n % 4) f(0, __ldg(scores + 4 * whole + thread));
  }
  // f(key) of every key of the warp's part.
  template <class F>
  __device__ void part(F f) const {
    const int32_t whole = begin + (end - begin) / 4 * 4, lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 4
    for (int32_t i = begin + 4 * lane; i < whole; i += 128) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(scores + i));
      f(x.x), f(x.y), f(x.z), f(x.w);
    }
    if (whole + lane < end) f(__ldg(scores + whole + lane));
  }
  // f(id, key) of the warp's part in order, a key per lane; as an integer, -1 where there is none.
  template <class F>
  __device__ void in_order(F f) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 8
    for (int32_t i = begin; i < end; i += 32) {
      f(i + lane, i + lane < end ? static_cast<int32_t>(__ldg(scores + i + lane)) : -1);
    }
  }
};

// The same of at most kThreads * kPerThread scores, read once into registers.
template <int kThreads, int kPerThread>
struct InRegisters {
  static constexpr int32_t kMost = kThreads * kPerThread;
  int32_t key[kPerThread];  // -1 where there is none
  int32_t first;            // id of the first one

  __device__ InRegisters(const uint32_t* scores, int32_t n) {
    constexpr int32_t kWarps = kThreads / 32;
    const int32_t part = ((n + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int32_t begin = static_cast<int32_t>(threadIdx.x / 32) * part, end = min(begin + part, n);
    first = begin + static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int32_t id = first + 32 * j;
      key[j] = id < end ? static_cast<int32_t>(__ldg(scores + id)) : -1;
    }
  }
  template <class F>
  __device__ void groups(F f) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (key[j] >= 0) f(j % 4, static_cast<uint32_t>(key[j]));
    }
  }
  template <class F>
  __device__ void part(F f) const {
    groups([&](int, uint32_t key) { f(key); });
  }
  template <class F>
  __device__ void in_order(F f) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) f(first + 32 * j, key[j]);
  }
};

// Threads of a block and what they pass each other.
template <int kThreads>
struct Threads {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);

  struct Sums {
    uint32_t first[kWarps], second[kWarps];
  };

  Warp warp;
  int thread = static_cast<int>(threadIdx.x);

  // Sum of what the warps before this one have left in `sums`.
  __device__ int32_t before_warp(const uint32_t* sums) const {
    const bool before = static_cast<int>(warp.lane) < thread / 32;
    return warp.sum(before ? static_cast<int32_t>(sums[warp.lane]) : 0);
  }
};

// A block over the keys of a row, which are with its threads as `Keys` says.
template <int kThreads, class Keys>
struct Block : Threads<kThreads> {
  using Base = Threads<kThreads>;
  using Base::kWarps, Base::thread, Base::warp;
  static constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits, kMine = kDigits / kThreads;
  static constexpr int kGroups = 4 * kThreads;
  static_assert(kMine * kThreads == kDigits);

  struct Shared {
    alignas(16) uint32_t bins[kDigits];
    typename Base::Sums sums;
    Found found;
  };

  Shared& shared;
  const Keys& keys;
  Before before;  // nothing is: the block has the row alone

  __device__ Block(Shared& shared, const Keys& keys) : shared(shared), keys(keys) {}

  template <class F>
  __device__ void each(F f) const {
    keys.groups([&](int, uint32_t key) { f(key); });
  }

  // If `wanted` groups have a greatest key of at least x, so many keys are at least x: the greatest keys of groups
  // bound the cut from below, and closely, so that only some more than `wanted` keys are ever counted.
  __device__ Range range(int32_t wanted) {
    uint32_t most[4] = {};
    keys.groups([&](int group, uint32_t key) { most[group] = max(most[group], key); });
    Range range{min(min(most[0], most[1]), min(most[2], most[3])), max(max(most[0], most[1]), max(most[2], most[3])),
                wanted};
    extremes(range.low, range.high);
    if (kGroups < wanted) return {0, range.high, wanted};
    if (range.low == range.high) return range;
    clear_bins();
    const int shift = range.shift(kDigitBits);
#pragma unroll
    for (const uint32_t key : most) count_if(true, (key - range.low) >> shift);
    range.low += find(wanted).digit << shift;
    return range;
  }
  __device__ void extremes(uint32_t& least, uint32_t& most) {
    least = warp.min(least), most = warp.max(most);
    if (warp.lane == 0) shared.sums.first[thread / 32] = least, shared.sums.second[thread / 32] = most;
    __syncthreads();
    const bool mine = warp.lane < kWarps;
    least = warp.min(mine ? shared.sums.first[warp.lane] : 0xFFFFFFFFu);
    most = warp.max(mine ? shared.sums.second[warp.lane] : 0u);
  }

  __device__ void clear_bins() {
    __syncthreads();  // the last bins and sums have been read
    for (int i = thread; i < kDigits; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
  }
  __device__ void count_if(bool condition, uint32_t digit) {
    if (condition) atomicAdd(&shared.bins[digit], 1u);
  }
  __device__ Found find(int32_t wanted) {
    __syncthreads();
    const uint32_t top = kDigits - 1 - thread * kMine;
    int32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += shared.bins[top - i];
    const int32_t upto = warp.sum_upto(mine);
    if (warp.lane == 31) shared.sums.first[thread / 32] = upto;
    __syncthreads();
    const int32_t above = upto - mine + this->before_warp(shared.sums.first);
    if (above < wanted && wanted <= above + mine) shared.found = find_among<kMine>(shared.bins, top, above, wanted);
    __syncthreads();
    return shared.found;
  }
};

}  // namespace jaxcp::qsa

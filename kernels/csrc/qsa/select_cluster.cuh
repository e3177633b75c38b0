// A team of select_cut.h that is a cluster of blocks, each with a part of a row's keys, the parts in order.
//
// What the blocks know of their parts each sends to all of them: first its greatest keys, then, per pass of the search,
// its bins; every block adds them up and finds the same digit. As the counts of each part are there, so are those of
// the parts before one's own, and when the search ends every block knows where its places begin: of random scores that
// takes three exchanges, of any at most five.
#pragma once

#include "qsa/select_lanes.cuh"

namespace jaxcp::qsa {

// Units of 16 bytes that each block of a cluster sends to every one, a round after the other. A round costs one cluster
// barrier: it fills one of two buffers, and a block sends into that one again only behind the next round's barrier,
// where all have arrived that have read it. Behind its last round a block may end: nobody reads another's memory.
template <int kBlocks, int kUnits>
struct Exchange {
  using Units = uint4[kUnits];
  Units received[2][kBlocks];

  // By all threads, before anything is sent. Between the two the other blocks begin to run.
  __device__ void begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
  __device__ void begun() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
  __device__ void send(int round, uint32_t from, uint32_t to, uint32_t unit, uint4 x) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.v4.u32 [there], {%2, %3, %4, "
        "%5};}" ::"r"(shared_address(&received[round % 2][from][unit])),
        "r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
  }
  // By all threads: what each block has sent this one.
  __device__ const Units* finish(int round) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return received[round % 2];
  }
};

template <int kBlocks, int kThreads, class Keys, template <int, int> class Exchange = Exchange>
struct Cluster : Threads<kThreads> {
  using Base = Threads<kThreads>;
  using Base::kWarps, Base::thread, Base::warp;
  static constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kUnits = kDigits / 4;
  static_assert(kBlocks <= 8 && kDigits <= kThreads);  // 8: what every device can place

  struct Shared {
    alignas(16) uint32_t bins[kDigits];
    Exchange<kBlocks, kUnits> exchange;
    uint4 of_warp[kWarps];
    typename Base::Sums sums;
    Found found;
    Before found_before;
  };

  Shared& shared;
  const Keys& keys;
  uint32_t rank;  // of the block
  int round = 0;
  Before before;

  // All blocks have called begin().
  __device__ Cluster(Shared& shared, const Keys& keys, uint32_t rank) : shared(shared), keys(keys), rank(rank) {}

  template <class F>
  __device__ void each(F f) const {
    keys.groups([&](int, uint32_t key) { f(key); });
  }

  // The bound of Block::range from greatest keys of groups of threads, at least twice as many as are wanted, so that
  // some may have no key, or only zeros. Of more than one key, since `before` comes with a pass.
  __device__ Range range(int32_t wanted) {
    uint32_t most = 0;
    each([&](uint32_t key) { most = max(most, key); });
    uint32_t least = most, lanes = 1;  // of a group
    for (int groups = kBlocks * kThreads / 4; lanes < 32 && groups >= wanted; groups /= 2, lanes *= 2)
      least = max(least, __shfl_xor_sync(Warp::kAll, least, lanes));
    const auto groups = static_cast<uint32_t>(__popc(warp.ballot(least > 0 && warp.lane % lanes == 0)));
    const uint4 all = exchanged({warp.min(least > 0 ? least : ~0u), warp.max(most), groups, 0});
    const uint32_t low = all.z >= static_cast<uint32_t>(wanted) ? all.x : 0;
    return {low, max(all.y, low + 1), wanted};
  }
  // Least of x, most of y and sum of z over the warps of all blocks.
  __device__ uint4 exchanged(uint4 of_warp) {
    if (warp.lane == 0) shared.of_warp[thread / 32] = of_warp;
    __syncthreads();
    shared.exchange.begun();
    if (thread < 32) {
      const uint4 of_block = together(warp.lane < kWarps ? shared.of_warp[warp.lane] : uint4{~0u});
      if (thread < kBlocks) shared.exchange.send(round, rank, thread, 0, of_block);
    }
    const auto received = shared.exchange.finish(round++);
    return together(warp.lane < kBlocks ? received[warp.lane][0] : uint4{~0u});
  }
  __device__ uint4 together(uint4 one) const {
    return {warp.min(one.x), warp.max(one.y), static_cast<uint32_t>(warp.sum(static_cast<int32_t>(one.z))), 0};
  }

  __device__ void clear_bins() {
    if (thread < kDigits) shared.bins[thread] = 0;  // the last ones have been sent, a barrier ago
    __syncthreads();
  }
  __device__ void count_if(bool condition, uint32_t digit) {
    if (condition) atomicAdd(&shared.bins[digit], 1u);
  }
  __device__ Found find(int32_t wanted) {
    __syncthreads();
    send_bins();
    const auto received = shared.exchange.finish(round++);
    const uint32_t digit = kDigits - 1 - thread;
    int32_t mine = 0, mine_before = 0;  // keys of this digit
    if (thread < kDigits) {
#pragma unroll
      for (uint32_t block = 0; block < kBlocks; ++block) {
        const auto count = reinterpret_cast<const int32_t*>(received[block])[digit];
        mine += count, mine_before += block < rank ? count : 0;
      }
    }
    const int32_t upto = warp.sum_upto(mine), upto_before = warp.sum_upto(mine_before);
    if (warp.lane == 31) shared.sums.first[thread / 32] = upto, shared.sums.second[thread / 32] = upto_before;
    __syncthreads();
    const int32_t above = upto - mine + this->before_warp(shared.sums.first);
    const int32_t above_before = upto_before - mine_before + this->before_warp(shared.sums.second);
    if (above < wanted && wanted <= above + mine)
      shared.found = {digit, above, mine}, shared.found_before = {above_before, mine_before};
    __syncthreads();
    before.narrow(shared.found_before.above, shared.found_before.inside);
    return shared.found;
  }
  // This block's bins, 16 bytes a thread; blocks do not begin with the same one.
  __device__ void send_bins() {
#pragma unroll
    for (uint32_t i = thread; i < kBlocks * kUnits; i += kThreads) {
      const uint32_t unit = i % kUnits;
      shared.exchange.send(round, rank, (i / kUnits + rank) % kBlocks, unit,
                           reinterpret_cast<const uint4*>(shared.bins)[unit]);
    }
  }
};

}  // namespace jaxcp::qsa

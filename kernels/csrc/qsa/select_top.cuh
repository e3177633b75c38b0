// Kernels that select from rows of given scores: by a block per row, and by a cluster of blocks.
#pragma once

#include "qsa/select.h"
#include "qsa/select_cluster.cuh"

namespace jaxcp::qsa {

__device__ __forceinline__ int32_t visible_blocks(const ScoredRows& r, int32_t row) {
  return min((__ldg(r.position + row) + 1) / r.ratio, r.blocks);
}

// The ids of those of a block's keys that the cut keeps; `first`: of its first key. What a warp keeps of its part of
// them follows what the warps, and blocks, before it keep.
template <class Team, class Keys>
__device__ __forceinline__ void write_kept(Team& team, const Keys& keys, const Cut& cut, int32_t first, int32_t* ids) {
  const Warp& warp = team.warp;
  auto& sums = team.shared.sums;
  int32_t above = 0, tied = 0;
  keys.part([&](uint32_t key) { above += key > cut.key, tied += key == cut.key; });
  above = warp.sum(above), tied = warp.sum(tied);
  __syncthreads();  // the search's sums have been read
  if (warp.lane == 0) sums.first[team.thread / 32] = above, sums.second[team.thread / 32] = tied;
  __syncthreads();
  Before before = team.before.of(cut);
  before.above += team.before_warp(sums.first), before.inside += team.before_warp(sums.second);
  Places places = before.places(cut);
  keys.in_order([&](int32_t id, int32_t key) {
    const auto at_cut = static_cast<int32_t>(cut.key);
    const int32_t place = places.take(warp, key > at_cut, key == at_cut);
    if (place >= 0) ids[place] = first + id;
  });
}

template <int kThreads, class Keys>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) top_blocks(const __grid_constant__ ScoredRows r) {
  using Team = Block<kThreads, Keys>;
  __shared__ typename Team::Shared shared;
  const auto row = static_cast<int32_t>(blockIdx.x);
  int32_t* const ids = r.ids + int64_t{row} * r.k;
  const int32_t n = visible_blocks(r, row);
  if (n <= r.k) {
    for (int32_t i = threadIdx.x; i < r.k; i += kThreads) ids[i] = i < n ? i : -1;
    return;
  }
  const Keys keys(reinterpret_cast<const uint32_t*>(r.scores + row * r.stride), n);
  Team team(shared, keys);
  const Cut cut = find_cut(team, r.k, r.k);
  write_kept(team, keys, cut, 0, ids);
}

// `Keys` are those of a block's part of the row.
template <int kBlocks, int kThreads, class Keys, template <int, int> class Exchange = Exchange>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1024 / kThreads)
    cluster_top_blocks(const __grid_constant__ ScoredRows r) {
  using Team = Cluster<kBlocks, kThreads, Keys, Exchange>;
  __shared__ typename Team::Shared shared;
  const auto row = static_cast<int32_t>(blockIdx.x / kBlocks), rank = static_cast<int32_t>(blockIdx.x % kBlocks);
  int32_t* const ids = r.ids + int64_t{row} * r.k;
  const int32_t n = visible_blocks(r, row);
  if (n <= r.k) {  // so it is for all blocks of the cluster
    for (int32_t i = rank * kThreads + threadIdx.x; i < r.k; i += kBlocks * kThreads) ids[i] = i < n ? i : -1;
    return;
  }
  shared.exchange.begin();
  const int32_t part = ((n + kBlocks - 1) / kBlocks + 31) / 32 * 32, first = min(rank * part, n);
  const Keys keys(reinterpret_cast<const uint32_t*>(r.scores + row * r.stride) + first, min(part, n - first));
  Team team(shared, keys, rank);
  const Cut cut = find_cut(team, r.k, r.k);
  write_kept(team, keys, cut, first, ids);
}

}  // namespace jaxcp::qsa

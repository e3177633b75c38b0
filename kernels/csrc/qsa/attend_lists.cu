// Lists of the tiles (attend_tile.h), and the merge of the parts of a list.
#include <cuda_bf16.h>

#include "attend.h"
#include "attend_tile.h"
#include "attend_walk.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kWarps = kWindow / 32;

// Sum of `n` over the threads before this one, and over all.
struct Scan {
  int before, all;
};
__device__ Scan scan(int n, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = n;
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  Scan result{sum - n, 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) result.before += warp_sums[w];
    result.all += warp_sums[w];
  }
  return result;
}

__global__ __launch_bounds__(kWindow) void build_lists(const AttendParams p, const Slice slice) {
  __shared__ uint32_t bitmaps[kMostRows][kWindow];
  __shared__ int warp_sums[kWarps];
  const int64_t offset = int64_t{blockIdx.x} * p.tile_rows, first = slice.first + offset;
  const int rows = static_cast<int>(min(int64_t{p.tile_rows}, slice.count - offset));
  const int32_t *request = p.request + first, *position = p.position + first;
  const int per_page = p.blocks_per_page();
  int32_t* list = slice.lists + blockIdx.x * p.list_words();
  int32_t* entries = list + 2;
  int count = 0;
  for (int leader = 0; leader < rows; ++leader) {
    const Group group = group_of(request, position, rows, leader, p.ratio);
    if (group.members == 0) continue;
    const int32_t* table = p.page_table + int64_t{request[leader]} * p.table_width;
    for (int window = 0; window < group.blocks; window += 32 * kWindow) {
#pragma unroll
      for (int row = 0; row < kMostRows; ++row) bitmaps[row][threadIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < p.width; i += kWindow) {
        int32_t ids[kMostRows];  // all rows' at once: one wait for memory
#pragma unroll
        for (int row = 0; row < kMostRows; ++row) {
          ids[row] = group.members >> row & 1 ? p.blocks[(first + row) * p.width + i] : -1;
        }
#pragma unroll
        for (int row = 0; row < kMostRows; ++row) mark(bitmaps[row], ids[row], window);
      }
      __syncthreads();
      const uint32_t any = union_word(bitmaps, rows, threadIdx.x);
      const Scan at = scan(__popc(any), warp_sums);
      emit(bitmaps, rows, threadIdx.x, window + 32 * threadIdx.x, any, table, p.table_width, per_page,
           entries + count + at.before);
      count += at.all;
      __syncthreads();  // before the next window clears the bitmaps
    }
  }
  if (threadIdx.x >= 32) return;
  const int row = threadIdx.x;
  const bool has_tail = row < rows && tail_of(position[row], p.ratio) > 0;
  const uint32_t tails = __ballot_sync(~0u, has_tail);
  if (has_tail) {
    const int32_t* table = p.page_table + int64_t{request[row]} * p.table_width;
    entries[count + __popc(tails & ((1u << row) - 1))] =
        tail_entry(table, p.table_width, per_page, position[row], p.ratio, row);
  }
  if (row == 0) list[0] = count, list[1] = __popc(tails);
}

constexpr int kMergeThreads = 256;

// o = sum_s 2^(lse_s - lse) o_s, lse = log2 sum_s 2^lse_s over the parts s, in a fixed order; a part without tokens is
// left out. The parts are read before their weights are known, to wait for memory once.
template <int DIM>
__global__ __launch_bounds__(kMergeThreads) void merge_parts(const AttendParams p, const Slice slice) {
  constexpr int kLanes = DIM / 4, kGroups = kMergeThreads / kLanes, kBatch = 12;
  __shared__ float lses[kMostSplits];
  __shared__ float4 sums[kGroups][kLanes];
  const int64_t heads = p.rows * p.heads, at = blockIdx.x;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const auto* parts = reinterpret_cast<const float4*>(slice.part_o) + at * kLanes + lane;
  const uint2 gates =
      p.gated() ? __ldg(static_cast<const uint2*>(p.products.q_gate) + (2 * at + 1) * kLanes + lane) : uint2{};
  if (threadIdx.x < p.splits) lses[threadIdx.x] = slice.part_lse[threadIdx.x * heads + at];
  float4 o[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int s = group + i * kGroups;
    o[i] = s < p.splits ? parts[s * heads * kLanes] : float4{};
  }
  __syncthreads();
  float top = -INFINITY, total = 0;
  for (int s = 0; s < p.splits; ++s) top = fmaxf(top, lses[s]);
  const float base = top == -INFINITY ? 0 : top;
  for (int s = 0; s < p.splits; ++s) total += exp2f(lses[s] - base);
  float4 sum{};
  const auto add = [&](int s, const float4& x) {
    const float weight = exp2f(lses[s] - base);
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
  };
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (group + i * kGroups < p.splits) add(group + i * kGroups, o[i]);
  }
  for (int s = group + kBatch * kGroups; s < p.splits; s += kGroups) add(s, parts[s * heads * kLanes]);
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0) return;
  for (int g = 1; g < kGroups; ++g) {
    const float4 x = sums[g][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const float norm = total == 0 ? 0 : 1 / total;
  uint2 out;
  if (p.gated()) {
    out = make_uint2(gated_pair(sum.x * norm, sum.y * norm, gates.x), gated_pair(sum.z * norm, sum.w * norm, gates.y));
  } else {
    out = make_uint2(bf16_pair(sum.x * norm, sum.y * norm), bf16_pair(sum.z * norm, sum.w * norm));
  }
  static_cast<uint2*>(p.o)[at * kLanes + lane] = out;
  if (lane == 0 && p.lse != nullptr) p.lse[at] = base + log2f(total);
}

template <class Visit>
cudaError_t with_dim(int dim, Visit visit) {
  if (dim == 64) return visit(merge_parts<64>);
  return dim == 128 ? visit(merge_parts<128>) : visit(merge_parts<256>);
}

}  // namespace

cudaError_t launch_lists(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  build_lists<<<slice.tiles, kWindow, 0, stream>>>(params, slice);
  return cudaGetLastError();
}

cudaError_t launch_merge(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  return with_dim(params.dim, [&](auto kernel) {
    kernel<<<static_cast<unsigned>(params.rows * params.heads), kMergeThreads, 0, stream>>>(params, slice);
    return cudaGetLastError();
  });
}

cudaError_t load_lists() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, build_lists);
  for (const int dim : {64, 128, 256}) {
    if (error == cudaSuccess)
      error = with_dim(dim, [&](auto kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
  }
  return error;
}

}  // namespace jaxcp::qsa

// What both attention kernels do alike: find the tokens of a list, gather them, load the queries, write results.
//
// Tiles of bf16 rows in shared memory: groups of 64 dims one after another, in each group a line of 128 bytes per row
// whose 16-byte units are permuted by the row's number modulo 8. That is the 128-byte swizzle of Hopper's MMA, and it
// keeps ldmatrix free of bank conflicts.
#pragma once

#include <cuda_bf16.h>

#include "attend_tile.h"

namespace jaxcp::qsa {

using Bf16 = __nv_bfloat16;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Bytes from the start of a tile of `ROWS` rows to unit `unit` (8 dims) of row `row`.
template <int ROWS>
__device__ __forceinline__ uint32_t tile_offset(int row, int unit) {
  return (unit >> 3) * (ROWS * 128) + row * 128 + (((unit ^ row) & 7) << 4);
}

// 16 bytes into shared memory; where not wanted, zeros.
__device__ __forceinline__ void copy_unit(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_unit_or_zeros(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0));
}

// The work of a block: some rows, a KV head, a part of the rows' list.
struct Item {
  int64_t first;   // row
  int rows, head;  // rows from there on; KV head
  int split;
  const int32_t* list;  // the tile's; null where rows go alone
};
__device__ __forceinline__ Item item_at(const AttendParams& p, const Slice& slice, uint32_t index) {
  Item item;
  const uint32_t heads = index / p.splits, tile = heads / p.kv_heads;
  const int64_t offset = int64_t{tile} * p.tile_rows;
  item.split = static_cast<int>(index - heads * p.splits);
  item.head = static_cast<int>(heads - tile * p.kv_heads);
  item.first = slice.first + offset;
  item.rows = static_cast<int>(min(int64_t{p.tile_rows}, slice.count - offset));
  item.list = p.has_lists() ? slice.lists + tile * p.list_words() : nullptr;
  return item;
}

// Entries [begin, end) of a list, those from `complete` on tails.
struct Part {
  int begin, end, complete;
};
__device__ __forceinline__ Part part_of(const AttendParams& p, int split, int complete, int tails) {
  const uint32_t all = complete + tails, each = all / p.splits, more = all - each * p.splits, at = split;
  const uint32_t begin = each * at + min(at, more);
  return {static_cast<int>(begin), static_cast<int>(begin + each + (at < more)), complete};
}

__device__ __forceinline__ int chunks_of(const AttendParams& p, const Part& part) {
  return ((part.end - part.begin) * p.ratio + kChunk - 1) / kChunk;
}

// A token of the pool, by its distance from the layer's first in 16-byte units, and the rows of the tile that attend to
// it; no rows: no token.
struct Token {
  uint32_t units = 0, rows = 0;
};
__device__ __forceinline__ Token token_of(const AttendParams& p, const Part& part, const int32_t* position, int index,
                                          uint32_t entry, int token) {
  if (index >= part.end) return {};
  const uint32_t rows = rows_of_token(entry, index >= part.complete, token, position, p.ratio);
  if (rows == 0) return {};
  return {(entry_slot(entry) * p.ratio + token) * (p.kv_heads * p.dim / 8), rows};
}

// Copies K or V of `COUNT` tokens into rows first ... of a tile of ROWS; lane `lanes` + i holds the units of token i,
// bit i of `present` says whether it is one; if not, its row is filled with zeros. `head` is opaque to the compiler,
// and addresses are made several at a time: an address is one instruction, and no copy waits for the registers of the
// one before it.
template <int DIM, int COUNT, int ROWS, bool ALL>
__device__ __forceinline__ void gather_some(uint32_t tile, int first, const uint8_t* head, uint32_t units, int lanes,
                                            uint32_t present) {
  constexpr int kLanes = DIM / 8, kAtOnce = 32 / kLanes, kCopies = COUNT / kAtOnce, kBatch = kCopies < 8 ? kCopies : 8;
  const int lane = threadIdx.x % 32, unit = lane % kLanes, own = lane / kLanes;
#pragma unroll
  for (int i = 0; i < kCopies; i += kBatch) {
    uint32_t at[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) at[j] = __shfl_sync(~0u, units, lanes + (i + j) * kAtOnce + own);
    const uint8_t* address[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) address[j] = head + uint64_t{at[j]} * 16;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = (i + j) * kAtOnce + own;
      const uint32_t to = tile + tile_offset<ROWS>(first + token, unit);
      if constexpr (ALL) {
        copy_unit(to, address[j]);
      } else {
        copy_unit_or_zeros(to, address[j], present >> token & 1);
      }
    }
  }
}
template <int DIM, int COUNT, int ROWS>
__device__ __forceinline__ void gather(uint32_t tile, int first, const Bf16* head, uint32_t units, int lanes,
                                       uint32_t present) {
  constexpr uint32_t kAll = ~0u >> (32 - COUNT);
  const Bf16* from = head + threadIdx.x % (DIM / 8) * 8;
  asm volatile("" : "+l"(from));
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  if ((present & kAll) == kAll) {
    gather_some<DIM, COUNT, ROWS, true>(tile, first, bytes, units, lanes, present);
  } else {
    gather_some<DIM, COUNT, ROWS, false>(tile, first, bytes, units, lanes, present);
  }
}

// First element of a KV head in a layer of `pool`.
__device__ __forceinline__ const Bf16* head_of(const AttendParams& p, const void* pool, int head) {
  const int64_t tokens = p.pages * p.page_size * __ldg(p.layer);
  return static_cast<const Bf16*>(pool) + (tokens * p.kv_heads + head) * p.dim;
}

// A query times the scale, rounded; eight of them.
__device__ __forceinline__ uint4 scaled(uint4 words, float scale) {
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&words);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 x = __bfloat1622float2(pairs[j]);
    pairs[j] = __floats2bfloat162_rn(x.x * scale, x.y * scale);
  }
  return words;
}

// Queries of an item into a tile of ROWS MMA rows: scaled and rounded; zeros behind the last one.
template <int DIM, int ROWS, int THREADS>
__device__ __forceinline__ void load_queries(const AttendParams& p, const Item& item, uint8_t* tile, int thread) {
  constexpr int kUnits = DIM / 8;
  const int group = p.group(), used = item.rows * group;
#pragma unroll 4
  for (int i = thread; i < ROWS * kUnits; i += THREADS) {
    const int m = i / kUnits, unit = i % kUnits;
    uint4 words{};
    if (m < used) {
      const int64_t at = (item.first + m / group) * p.heads + item.head * group + m % group;
      words =
          scaled(*reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.q) + at * DIM + unit * 8), p.scale_log2e);
    }
    *reinterpret_cast<uint4*>(tile + tile_offset<ROWS>(m, unit)) = words;
  }
}

// Where the result of MMA row `m` goes: its (row, head), counted over [rows, heads]; -1 if it has none.
__device__ __forceinline__ int64_t result_row(const AttendParams& p, const Item& item, int m) {
  const int group = p.group();
  if (m >= item.rows * group) return -1;
  return (item.first + m / group) * p.heads + item.head * group + m % group;
}

// Writes N (2 or 4) neighbouring values of a result; to its part where a list is cut.
template <int N>
__device__ __forceinline__ void write(const AttendParams& p, const Slice& slice, int split, int64_t row, int dim,
                                      const float* x) {
  if (p.splits > 1) {
    float* to = slice.part_o + (split * p.rows * p.heads + row) * p.dim + dim;
    if constexpr (N == 4) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    if constexpr (N == 2) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
    return;
  }
  Bf16* to = static_cast<Bf16*>(p.o) + row * p.dim + dim;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    reinterpret_cast<__nv_bfloat162*>(to)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
  }
}
__device__ __forceinline__ void write_lse(const AttendParams& p, const Slice& slice, int split, int64_t row,
                                          float lse) {
  (p.splits > 1 ? slice.part_lse + split * p.rows * p.heads : p.lse)[row] = lse;
}

// Loads a kernel for every dim on the current device and lets it have the shared memory it asks for.
template <class WithKernel>
cudaError_t load_all(WithKernel with_kernel) {
  cudaError_t error = cudaSuccess;
  for (const int dim : {64, 128, 256}) {
    if (error != cudaSuccess) break;
    error = with_kernel(dim, [](auto kernel, int bytes) {
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    });
  }
  return error;
}

}  // namespace jaxcp::qsa

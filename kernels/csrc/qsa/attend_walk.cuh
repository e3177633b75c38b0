// What both attention kernels do alike: find the tokens of a list, gather them, load the queries, write results.
//
// Tiles of bf16 rows in shared memory: groups of 64 dims one after another, in each group a line of 128 bytes per row
// whose 16-byte units are permuted by the row's number modulo 8. That is the 128-byte swizzle of Hopper's MMA, and it
// keeps ldmatrix free of bank conflicts.
#pragma once

#include <cuda_bf16.h>

#include "attend_softmax.cuh"
#include "attend_tile.h"
#include "head.cuh"

namespace jaxcp::qsa {

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
  int group;            // query heads of the KV head
  uint32_t inverse;     // 2^16 / group, rounded up: divides MMA rows exactly, which are below 64

  __device__ int row_of(int m) const { return static_cast<int>(m * inverse >> 16); }
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
  item.group = p.group(), item.inverse = 65535 / item.group + 1;
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

// First element of a KV head in a layer of `pool`; of the nearest one if there is no such layer.
__device__ __forceinline__ const Bf16* head_of(const AttendParams& p, const void* pool, int head) {
  const int64_t layer = max(int64_t{0}, min(int64_t{__ldg(p.layer)}, p.layers - 1));
  const int64_t tokens = p.pages * p.page_size * layer;
  return static_cast<const Bf16*>(pool) + (tokens * p.kv_heads + head) * p.dim;
}

// Where the result of MMA row `m` goes: its (row, head), counted over [rows, heads]; -1 if it has none.
__device__ __forceinline__ int64_t result_row(const AttendParams& p, const Item& item, int m) {
  if (m >= item.rows * item.group) return -1;
  const int row = item.row_of(m);
  return (item.first + row) * p.heads + (item.head - row) * item.group + m;
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

// Eight features of the query of (row, head) `at`, normed and rotated; zeros if `at` is negative. By a Head's lanes.
template <int DIM>
__device__ __forceinline__ uint4 made_query(const AttendParams& p, int64_t at, int64_t row) {
  using H = Head<DIM>;
  const Products& of = p.products;
  if (at < 0) row = 0;
  const auto* from = static_cast<const uint4*>(of.q_gate) + (at < 0 ? 0 : 2 * at * H::kLanes) + H::lane();
  H head{at < 0 ? Eight{} : Eight::of(__ldg(from))};
  const int64_t angles = row * of.angles.pairs;
  head.normalise(H::weights(of.norm), of.eps);
  head.template rotate<false>(Turn(of.angles.cos + angles, of.angles.sin + angles, of.angles.pairs, H::lane()));
  return head.mine.rounded();
}

// Queries of an item into a tile of ROWS MMA rows: scaled and rounded; zeros behind the last one. Where they are not
// given they are made here.
template <int DIM, int ROWS, int THREADS>
__device__ __forceinline__ void load_queries(const AttendParams& p, const Item& item, uint8_t* tile, int thread) {
  constexpr int kUnits = DIM / 8;  // of a query, one per lane of a Head
  static_assert(ROWS * kUnits % 32 == 0, "all lanes of a warp take part");
#pragma unroll 2
  for (int i = thread; i < ROWS * kUnits; i += THREADS) {
    const int m = i / kUnits, unit = i % kUnits;
    const int64_t row = result_row(p, item, m);
    uint4 words{};
    if (p.q != nullptr) {
      if (row >= 0) words = __ldg(static_cast<const uint4*>(p.q) + row * kUnits + unit);
    } else {
      words = made_query<DIM>(p, row, item.first + item.row_of(m));
    }
    *reinterpret_cast<uint4*>(tile + tile_offset<ROWS>(m, unit)) = scaled(words, p.scale_log2e);
  }
}

// Gates of eight neighbouring values of a result, bf16; nothing where results are not gated.
__device__ __forceinline__ uint4 gates_of(const AttendParams& p, int64_t row, int dim) {
  if (!p.gated() || p.splits > 1 || row < 0) return uint4{};
  return __ldg(
      reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.products.q_gate) + (2 * row + 1) * p.dim + dim));
}

// Two values rounded to bf16, times the sigmoids of their gates.
__device__ __forceinline__ uint32_t gated_pair(float x, float y, uint32_t gates) {
  constexpr float kLog2E = 1.44269504f;
  const float2 o = __bfloat1622float2(__floats2bfloat162_rn(x, y));
  const float2 gate = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gates));
  return bf16_pair(__fdividef(o.x, 1 + exp2_fast(-kLog2E * gate.x)), __fdividef(o.y, 1 + exp2_fast(-kLog2E * gate.y)));
}

// A result as it is stored; of eight neighbouring values.
__device__ __forceinline__ uint4 result_of(const AttendParams& p, const float (&x)[8], const uint4& gates) {
  if (!p.gated()) {
    return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
  }
  return make_uint4(gated_pair(x[0], x[1], gates.x), gated_pair(x[2], x[3], gates.y), gated_pair(x[4], x[5], gates.z),
                    gated_pair(x[6], x[7], gates.w));
}

// Writes eight neighbouring values of a result, if it is one; to its part where a list is cut.
__device__ __forceinline__ void write(const AttendParams& p, const Slice& slice, int split, int64_t row, int dim,
                                      const float (&x)[8], const uint4& gates) {
  if (row < 0) return;
  if (p.splits > 1) {
    auto* to = reinterpret_cast<float4*>(slice.part_o + (split * p.rows * p.heads + row) * p.dim + dim);
    to[0] = make_float4(x[0], x[1], x[2], x[3]), to[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<Bf16*>(p.o) + row * p.dim + dim) = result_of(p, x, gates);
  }
}
__device__ __forceinline__ void write_lse(const AttendParams& p, const Slice& slice, int split, int64_t row,
                                          float lse) {
  float* to = p.splits > 1 ? slice.part_lse + split * p.rows * p.heads : p.lse;
  if (to != nullptr && row >= 0) to[row] = lse;
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

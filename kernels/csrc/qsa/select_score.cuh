// Scores of 8 query rows a warp against the keys of one request: keys through shared memory, products by mma.sync.
//
// An m16n8k16 product holds 8 rows x 2 heads (row g of the fragment: query row g of the even head, row g + 8: of the
// odd one), so that one thread has all heads of a (row, key) pair and sums them in order of heads. Which key a column
// of B is does not matter to the product: tile j's column n is key 2 kTiles (n / 2) + 2 j + n % 2 of a step, which
// gives each thread 2 kTiles neighbouring keys of its row.
//
// Keys lie in shared memory a row after the other, padded by 16 bytes, and by 32 more per 8 rows: the 8 rows that one
// ldmatrix phase reads (0, 1, 8, 9, 16, ... or 0, 1, 4, 5, 8, ...) fall on all 8 groups of 4 banks. Four producer warps
// copy a stage of 64 keys, 16 bytes a lane (a bulk copy per key takes some 60 clocks, four times what the products
// need); warps wait and release by mbarriers and are otherwise independent.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "qsa/select.h"
#include "qsa/select_lanes.cuh"

namespace jaxcp::qsa {

constexpr int kWarps = 8, kProducers = 4, kThreads = 32 * (kWarps + kProducers), kStages = 8;
constexpr int kWarpRows = kTileRows / kWarps;

template <int kHeadTiles_, int kDim_, bool kE4m3_>
struct Shape {
  static constexpr int kHeadTiles = kHeadTiles_, kDim = kDim_;  // two heads a tile
  static constexpr bool kE4m3 = kE4m3_;
  static constexpr int kSteps = kDim / 16;                // products along the dimension
  static constexpr int kTiles = kHeadTiles == 2 ? 4 : 2;  // tiles of 8 keys at once: what registers hold
  static constexpr int kScores = 2 * kTiles;              // neighbouring keys of a thread
  static constexpr int kStepKeys = 8 * kTiles;
  static constexpr int kRowBytes = kDim * (kE4m3 ? 1 : 2);
  static constexpr int kStride = kRowBytes + 16;
  static constexpr int kStageBytes = kStageKeys * kStride + kStageKeys / 8 * 32;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr float kScale = kDim == 128 ? 0.08838834764831845f : 0.125f;  // dim^-1/2
  static_assert(kDim == 64 || kDim == 128);
  __host__ __device__ static constexpr int key_offset(int key) { return key * kStride + key / 8 * 32; }
};

// f(Shape{}) of the variant for these sizes, of those with up to kHeads heads.
template <int kHeads, class F>
cudaError_t with_shape(int heads, int dim, bool e4m3, F f) {
  const auto with_dim = [&]<int kHeadTiles>() {
    if (dim == 128) return e4m3 ? f(Shape<kHeadTiles, 128, true>{}) : f(Shape<kHeadTiles, 128, false>{});
    return e4m3 ? f(Shape<kHeadTiles, 64, true>{}) : f(Shape<kHeadTiles, 64, false>{});
  };
  if constexpr (kHeads > 4) {
    if (heads > 4) return with_dim.template operator()<4>();
  }
  return with_dim.template operator()<2>();
}

// The first error of f(Shape{}) over all those variants.
template <int kHeads, class F>
cudaError_t each_shape(F f) {
  for (int heads = 4; heads <= kHeads; heads += 4) {
    for (const int dim : {64, 128}) {
      for (const bool e4m3 : {false, true}) {
        if (const cudaError_t error = with_shape<kHeads>(heads, dim, e4m3, f); error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

// Stages of shared memory between the producer and the warps that read them; all count the tiles that went through.
struct Stages {
  uint64_t full[kStages], empty[kStages];

  __device__ void open(int readers) {  // threads that release a stage
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&full[i])), "r"(32 * kProducers));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&empty[i])), "r"(readers));
      }
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
  }
  __device__ static void wait(const uint64_t& barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra.uni out;\nbra.uni again;\nout:\n}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
  }
  __device__ void wait_full(uint32_t tile) const { wait(full[tile % kStages], tile / kStages % 2); }
  __device__ void wait_empty(uint32_t tile) const { wait(empty[tile % kStages], tile / kStages % 2 ^ 1); }
  // Arrives when this thread's copies so far have.
  __device__ void fill(uint32_t tile) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full[tile % kStages]))
                 : "memory");
  }
  // By every thread that has read: one lane for its warp would do, and is no faster, but racecheck does not follow it.
  __device__ void release(uint32_t tile) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&empty[tile % kStages])) : "memory");
  }
};

// Registers move from the producers' warpgroup to the others: 40 x 128 + 232 x 256 of the 168 x 384 at the start.
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

// Where the keys of one request lie.
struct Keys {
  const uint8_t* pool;   // of the layer
  const int32_t* pages;  // of the request
  int32_t page_blocks, page_count;

  __device__ Keys(const SelectParams& p, int32_t request, int row_bytes) {
    const int32_t layer = min(max(*p.layer, 0), p.layers - 1);
    page_blocks = p.page_blocks, page_count = p.pages;
    pool = static_cast<const uint8_t*>(p.pool) + int64_t{layer} * p.pages * p.page_blocks * row_bytes;
    pages = p.page_table + int64_t{min(max(request, 0), p.requests - 1)} * p.request_pages;
  }
  __device__ const uint8_t* key(int32_t block, int row_bytes) const {
    const int32_t page = min(max(__ldg(pages + block / page_blocks), 0), page_count - 1);
    return pool + (int64_t{page} * page_blocks + block % page_blocks) * row_bytes;
  }
};

__device__ __forceinline__ void copy_unit(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The producer warps: copy blocks first ... limit - 1, a tile of kStageKeys after the other, 16 keys a warp. Keys
// behind the limit are copies of the last one, which nobody uses. Lanes look up a key each, a tile ahead.
template <class S>
__device__ void produce(Stages& stages, const uint8_t* buffers, uint32_t& tile, const Keys& keys, int32_t first,
                        int32_t limit) {
  constexpr int kMine = kStageKeys / kProducers, kUnits = S::kRowBytes / 16, kAtOnce = 32 / kUnits;
  static_assert(kMine == 16 && 8 % kAtOnce == 0);
  const int lane = threadIdx.x % 32, first_key = (threadIdx.x / 32 - kWarps) * kMine;
  const auto find = [&](int32_t base) {
    return reinterpret_cast<uint64_t>(keys.key(min(base + first_key + lane % kMine, limit - 1), S::kRowBytes));
  };
  const uint32_t to = S::key_offset(first_key) + lane / kUnits * S::kStride + lane % kUnits * 16;
  uint64_t found = first < limit ? find(first) : 0;
  for (int32_t base = first; base < limit; base += kStageKeys, ++tile) {
    const uint64_t here = found;
    found = find(base + kStageKeys);
    stages.wait_empty(tile);
    const uint32_t buffer = shared_address(buffers + tile % kStages * S::kStageBytes) + to;
#pragma unroll
    for (int i = 0; i < kMine; i += kAtOnce) {
      const uint64_t from = __shfl_sync(Warp::kAll, here, i + lane / kUnits) + lane % kUnits * 16;
      copy_unit(buffer + S::key_offset(i), reinterpret_cast<const uint8_t*>(from));
    }
    stages.fill(tile);
  }
}

// Index queries of a warp's 8 rows as operands of the products.
template <class S>
struct QueryTile {
  uint32_t word[S::kHeadTiles][S::kSteps][4];

  // Words of this thread's row; zeros for heads that there are not. A row behind the last one is a copy of it, and like
  // every row that sees nothing of a request its scores are not used.
  __device__ void load(const SelectParams& p, int32_t row) {
    const auto* q = static_cast<const __nv_bfloat16*>(p.index_q) + int64_t{min(row, p.rows - 1)} * p.heads * S::kDim;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < S::kHeadTiles; ++t) {
      asm volatile("" : "+l"(q));  // the loads of one tile at a time, or their addresses fill the registers
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int head = 2 * t + i % 2;  // words 0, 1: dims 2 c, 2 c + 1 of both heads; words 2, 3: 8 further on
          const int dim = 16 * s + (S::kE4m3 ? 4 * c + i / 2 * 2 : 2 * c + i / 2 * 8);  // e4m3: as its bytes lie
          uint32_t pair = 0;
          if (head < p.heads) pair = __ldg(reinterpret_cast<const uint32_t*>(q + head * S::kDim + dim));
          word[t][s][i] = S::kE4m3 ? as_half(pair) : pair;
        }
      }
    }
  }
  __device__ static uint32_t as_half(uint32_t bf16_pair) {
    const __half2 h = __floats2half2_rn(__uint_as_float(bf16_pair << 16), __uint_as_float(bf16_pair & 0xFFFF0000u));
    return reinterpret_cast<const uint32_t&>(h);
  }
};

template <class S>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (S::kE4m3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// Two e4m3 as two float16, exactly.
__device__ __forceinline__ uint32_t widened(uint32_t two_bytes) {
  uint32_t out;
  asm("{.reg .b16 x; cvt.u16.u32 x, %1; cvt.rn.f16x2.e4m3x2 %0, x;}" : "=r"(out) : "r"(two_bytes));
  return out;
}

// max(0, x), NaN if x is
__device__ __forceinline__ float positive_part(float x) {
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
}

// Products of a warp's rows and heads with the keys of a step, before they become scores.
template <class S>
struct Sums {
  float of[S::kHeadTiles][S::kTiles][4];

  // `keys`: shared address of the step's first key.
  __device__ __forceinline__ void multiply_by(const QueryTile<S>& q, uint32_t keys) {
    const uint32_t lane = threadIdx.x % 32, n = lane % 8;
    const uint32_t mine = keys + S::key_offset(n / 2 * S::kScores + n % 2) + lane / 8 * 16;
    constexpr int kLoad = S::kE4m3 ? 4 : 2;  // products per load of 64 bytes
#pragma unroll
    for (int t = 0; t < S::kHeadTiles * S::kTiles * 4; ++t) of[t / (S::kTiles * 4)][t / 4 % S::kTiles][t % 4] = 0;
#pragma unroll
    for (int s = 0; s < S::kSteps; s += kLoad) {
#pragma unroll
      for (int j = 0; j < S::kTiles; ++j) {
        uint32_t b[4];
        load_matrices(b, mine + 2 * j * S::kStride + s / kLoad * 64);
#pragma unroll
        for (int i = 0; i < kLoad; ++i) {
          const uint32_t b0 = S::kE4m3 ? widened(b[i] & 0xFFFF) : b[2 * i % 4];
          const uint32_t b1 = S::kE4m3 ? widened(b[i] >> 16) : b[(2 * i + 1) % 4];
#pragma unroll
          for (int t = 0; t < S::kHeadTiles; ++t) multiply<S>(of[t][j], q.word[t][s + i], b0, b1);
        }
      }
    }
  }

  // Score of this thread's row with its i-th key, the key kScores (lane % 4) + i of the step.
  __device__ __forceinline__ float score(int i) const {
    float total = positive_part(of[0][i / 2][i % 2]) + positive_part(of[0][i / 2][2 + i % 2]);
#pragma unroll
    for (int t = 1; t < S::kHeadTiles; ++t) {
      total = total + positive_part(of[t][i / 2][i % 2]);
      total = total + positive_part(of[t][i / 2][2 + i % 2]);
    }
    return total * S::kScale;
  }
};

// The rows of a tile that need scores, taken one request after another. Every warp keeps its own, identical copy.
struct TileRows {
  int32_t request[2], visible[2];  // of rows lane, lane + 32
  uint64_t pending;                // rows whose request has not come yet
  uint64_t active = 0;             // rows of the present one
  int32_t which = 0, limit = 0;    // the present one; most blocks that one of its rows sees

  __device__ TileRows(const SelectParams& p, int32_t first_row, int32_t rows) {
    const Warp warp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = first_row + static_cast<int32_t>(warp.lane) + 32 * i;
      const bool inside = static_cast<int32_t>(warp.lane) + 32 * i < rows;
      request[i] = inside ? __ldg(p.request + row) : 0;
      visible[i] = inside ? min((__ldg(p.position + row) + 1) / p.ratio, p.blocks) : 0;
    }
    pending = both(visible[0] > p.k, visible[1] > p.k);
  }
  __device__ static uint64_t both(bool low, bool high) {
    return __ballot_sync(Warp::kAll, low) | uint64_t{__ballot_sync(Warp::kAll, high)} << 32;
  }
  __device__ int32_t of(const int32_t (&x)[2], int row) const {
    const int32_t low = __shfl_sync(Warp::kAll, x[0], row % 32), high = __shfl_sync(Warp::kAll, x[1], row % 32);
    return row < 32 ? low : high;
  }
  // The next request's rows become active; false if there is none.
  __device__ bool next() {
    if (pending == 0) return false;
    const Warp warp;
    which = of(request, __ffsll(static_cast<long long>(pending)) - 1);
    active = pending & both(request[0] == which, request[1] == which);
    pending &= ~active;
    const int32_t low = active >> warp.lane & 1 ? visible[0] : 0,
                  high = active >> (warp.lane + 32) & 1 ? visible[1] : 0;
    limit = warp.max(max(low, high));
    return true;
  }
  // What a row of the tile sees of the present request.
  __device__ int32_t seen(int row) const {
    const int32_t v = of(visible, row);
    return active >> row & 1 ? v : 0;
  }
};

// ids of a row that sees at most k blocks: all of them. By one warp.
__device__ inline void write_all(int32_t* ids, int32_t visible, int32_t k) {
  for (int32_t i = threadIdx.x % 32; i < k; i += 32) ids[i] = i < visible ? i : -1;
}

}  // namespace jaxcp::qsa

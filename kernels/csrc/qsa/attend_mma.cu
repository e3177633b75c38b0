// The portable attention kernel: mma.sync, ldmatrix, cp.async. Serves single rows everywhere and tiles where there is no
// warpgroup MMA.
//
// A block of SLICES * PARTS warps: warp (slice, part) computes 16 MMA rows over its part of every chunk's tokens, all dims.
// Warps share the gathered chunk and nothing else until the end, where the parts are merged in shared memory. Ring of
// kStages chunks: while one is computed the next kStages - 1 arrive; one barrier per chunk.
#include "attend.h"
#include "attend_softmax.cuh"
#include "attend_walk.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kStages = 3;

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int DIM, int SLICES, int PARTS>
struct Shape {
  static constexpr int kRows = 16 * SLICES, kWarps = SLICES * PARTS, kThreads = 32 * kWarps;
  static constexpr int kTokens = kChunk / kWarps;   // gathered by a warp per chunk
  static constexpr int kColumns = kChunk / PARTS;   // computed by a warp per chunk
  static constexpr int kQueryBytes = kRows * DIM * 2, kHalf = kChunk * DIM * 2, kStage = 2 * kHalf;
  static constexpr int kPitch = DIM + 8;            // floats of a merged row: 8 rows' pairs fall on distinct banks
  static_assert(PARTS * kRows * kPitch * 4 <= kStages * kStage, "the merge takes the ring's place");
  struct Small {
    float top[PARTS][kRows], total[PARTS][kRows];
    uint8_t masks[kStages][kChunk];
  };
  static constexpr int kBytes = kQueryBytes + kStages * kStage + sizeof(Small);
};

// A lane's token of each chunk, looked up two chunks ahead: first its entry or block id, then its place.
struct Feed {
  const int32_t* items;  // entries of the part's list, or block ids
  const int32_t* table;  // null: items are entries
  const int32_t* position;
  int shift;             // log2 ratio
  Part part;

  __device__ uint32_t fetch(const AttendParams& p, int token) const {
    const int index = part.begin + (token >> shift);
    if (index >= part.end) return 0;
    if (table != nullptr && index >= part.complete) return (*position + 1) >> shift;
    return items[index];
  }
  __device__ Token resolve(const AttendParams& p, int token, uint32_t raw) const {
    const int index = part.begin + (token >> shift);
    if (index >= part.end) return {};
    if (table != nullptr) raw = list_entry(slot_of(table, p.table_width, p.blocks_per_page(), raw), 1);
    return token_of(p, part, position, index, raw, token & (p.ratio - 1));
  }
};

// Ids in front of the first -1; every thread looks at its own.
template <int THREADS>
__device__ int count_ids(const int32_t* ids, int width) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < width; i += THREADS) {
    if (ids[i] >= 0 && (i + 1 == width || ids[i + 1] < 0)) count = i + 1;
  }
  __syncthreads();
  return count;
}

template <int THREADS>
__device__ Feed feed_of(const AttendParams& p, const Item& item) {
  Feed feed{item.list, nullptr, p.position + item.first, __ffs(p.ratio) - 1, {}};
  if (item.list != nullptr) {
    feed.items += 2;
    feed.part = part_of(p, item.split, item.list[0], item.list[1]);
    return feed;
  }
  feed.items = p.blocks + item.first * p.width;
  feed.table = p.page_table + int64_t{p.request[item.first]} * p.table_width;
  const int position = *feed.position, complete = count_ids<THREADS>(feed.items, p.width);
  feed.part = part_of(p, item.split, position < 0 ? 0 : complete, tail_of(position, p.ratio) > 0);
  return feed;
}

template <int DIM, int SLICES, int PARTS>
__global__ __launch_bounds__(32 * SLICES * PARTS, 1) void attend_portable(const AttendParams p, const Slice slice) {
  using S = Shape<DIM, SLICES, PARTS>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* ring = shared + S::kQueryBytes;
  auto& small = *reinterpret_cast<typename S::Small*>(ring + kStages * S::kStage);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_slice = warp % SLICES, part = warp / SLICES;
  const Item item = item_at(p, slice, blockIdx.x);
  const Feed feed = feed_of<S::kThreads>(p, item);
  const Bf16 *k = head_of(p, p.k, item.head), *v = head_of(p, p.v, item.head);
  const int chunks = ((feed.part.end - feed.part.begin) * p.ratio + kChunk - 1) / kChunk;

  const int mine = warp * S::kTokens + min(lane, S::kTokens - 1);
  Token token = feed.resolve(p, mine, feed.fetch(p, mine));
  uint32_t raw = feed.fetch(p, kChunk + mine);
  const auto issue = [&](int chunk) {
    if (chunk < chunks) {
      const uint32_t stage = shared_address(ring + chunk % kStages * S::kStage);
      if (lane < S::kTokens) small.masks[chunk % kStages][mine] = static_cast<uint8_t>(token.rows);
      const uint32_t present = __ballot_sync(~0u, token.rows != 0);
      gather<DIM, S::kTokens>(stage, warp * S::kTokens, k, token.units, 0, present);
      gather<DIM, S::kTokens>(stage + S::kHalf, warp * S::kTokens, v, token.units, 0, present);
      token = feed.resolve(p, (chunk + 1) * kChunk + mine, raw);
      raw = feed.fetch(p, (chunk + 2) * kChunk + mine);
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int chunk = 0; chunk < kStages - 1; ++chunk) issue(chunk);
  load_queries<DIM, S::kRows, S::kThreads>(p, item, shared, threadIdx.x);

  constexpr int kTiles = S::kColumns / 8;
  float o[DIM / 8][4] = {};
  Running running;
  const int m = row_slice * 16 + lane / 4, group = p.group();
  const uint32_t rows[2] = {row_bit(m, group), row_bit(m + 8, group)};
  const int column = part * S::kColumns;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();  // this chunk is there for all warps, and all are done with the one whose place is filled next
    issue(chunk + kStages - 1);
    const uint32_t keys = shared_address(ring + chunk % kStages * S::kStage), values = keys + S::kHalf;
    const uint32_t queries = shared_address(shared);

    float s[kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, queries + tile_offset<S::kRows>(row_slice * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        uint32_t b[4];
        const int row = column + 8 * t + lane % 8 + lane / 16 * 8;
        load_matrices(b, keys + tile_offset<kChunk>(row, 2 * step + lane / 8 % 2));
        multiply(s[t], a, b[0], b[1]);
        multiply(s[t + 1], a, b[2], b[3]);
      }
    }
    uint32_t masks[kTiles], probabilities[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      masks[t] = *reinterpret_cast<const uint16_t*>(&small.masks[chunk % kStages][column + 8 * t + lane % 4 * 2]);
    }
    float shrink[2];
    if (take_scores(s, masks, rows, running, shrink, probabilities)) {
#pragma unroll
      for (int t = 0; t < DIM / 8; ++t) {
        o[t][0] *= shrink[0], o[t][1] *= shrink[0], o[t][2] *= shrink[1], o[t][3] *= shrink[1];
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      const uint32_t a[4] = {probabilities[t][0], probabilities[t][1], probabilities[t + 1][0], probabilities[t + 1][1]};
#pragma unroll
      for (int d = 0; d < DIM / 8; d += 2) {
        uint32_t b[4];
        load_transposed(b, values + tile_offset<kChunk>(column + 8 * t + lane % 16, d + lane / 16));
        multiply(o[d], a, b[0], b[1]);
        multiply(o[d + 1], a, b[2], b[3]);
      }
    }
  }

  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* merged = reinterpret_cast<float*>(ring);  // [PARTS][kRows][kPitch]
  finish(running);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* row = merged + (part * S::kRows + m + 8 * r) * S::kPitch + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < DIM / 8; ++t) {
      *reinterpret_cast<float2*>(row + 8 * t) = make_float2(o[t][2 * r], o[t][2 * r + 1]);
    }
    if (lane % 4 == 0) small.top[part][m + 8 * r] = running.top[r], small.total[part][m + 8 * r] = running.total[r];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < S::kRows * (DIM / 4); i += S::kThreads) {
    const int row = i / (DIM / 4), dim = i % (DIM / 4) * 4;
    const int64_t to = result_row(p, item, row);
    if (to < 0) break;
    float top = -INFINITY, total = 0, x[4] = {};
#pragma unroll
    for (int j = 0; j < PARTS; ++j) top = fmaxf(top, small.top[j][row]);
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const float weight = exp2_fast(small.top[j][row] - finite(top));
      const float4 y = *reinterpret_cast<const float4*>(merged + (j * S::kRows + row) * S::kPitch + dim);
      total += weight * small.total[j][row];
      x[0] += weight * y.x, x[1] += weight * y.y, x[2] += weight * y.z, x[3] += weight * y.w;
    }
    const float norm = total == 0 ? 0 : 1 / total;
#pragma unroll
    for (float& y : x) y *= norm;
    write<4>(p, slice, item.split, to, dim, x);
    if (dim == 0) write_lse(p, slice, item.split, to, finite(top) + log2f(total));
  }
}

template <class Visit>
cudaError_t with_kernel(const AttendParams& p, Visit visit) {
  const bool one = p.tile_rows == 1 && p.group() <= 16;
  const auto of_dim = [&]<int DIM>() {
    return one ? visit(attend_portable<DIM, 1, 4>, Shape<DIM, 1, 4>{}) : visit(attend_portable<DIM, 4, 2>, Shape<DIM, 4, 2>{});
  };
  if (p.dim == 64) return of_dim.template operator()<64>();
  return p.dim == 128 ? of_dim.template operator()<128>() : of_dim.template operator()<256>();
}

}  // namespace

cudaError_t launch_portable(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  return with_kernel(params, [&](auto kernel, auto shape) {
    const int64_t blocks = int64_t{slice.tiles} * params.kv_heads * params.splits;
    kernel<<<static_cast<unsigned>(blocks), shape.kThreads, shape.kBytes, stream>>>(params, slice);
    return cudaGetLastError();
  });
}

cudaError_t load_portable() {
  AttendParams p{};
  p.kv_heads = p.tile_rows = 1;
  cudaError_t error = cudaSuccess;
  for (p.dim = 64; p.dim <= 256; p.dim *= 2) {
    for (const int heads : {16, 64}) {
      p.heads = heads;
      if (error != cudaSuccess) break;
      error = with_kernel(p, [](auto kernel, auto shape) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.kBytes);
      });
    }
  }
  return error;
}

}  // namespace jaxcp::qsa

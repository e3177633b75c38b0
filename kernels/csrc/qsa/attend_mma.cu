// Tiles where there is no warpgroup MMA: mma.sync, ldmatrix, cp.async.
//
// A block of SLICES * PARTS warps: warp (slice, part) computes 16 MMA rows over its part of every chunk's tokens, all
// dims. Warps share the gathered chunk and nothing else until the end, where the parts are merged in shared memory.
// Ring of kStages chunks: while one is computed the next kStages - 1 arrive; one barrier per chunk.
#include "attend.h"
#include "attend_mma.cuh"
#include "attend_softmax.cuh"
#include "attend_walk.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kStages = 3;

constexpr int kSlices = kTileHeads / 16, kParts = 2, kWarps = kSlices * kParts, kThreads = 32 * kWarps;
constexpr int kTokens = kChunk / kWarps;   // gathered by a warp per chunk
constexpr int kColumns = kChunk / kParts;  // computed by a warp per chunk

template <int DIM>
struct Shape {
  static constexpr int kQueryBytes = kTileHeads * DIM * 2, kHalf = kChunk * DIM * 2, kStage = 2 * kHalf;
  static_assert(kParts * kTileHeads * (DIM + 8) * 4 <= kStages * kStage, "the merge takes the ring's place");
  struct Small {
    float top[kParts][kTileHeads], total[kParts][kTileHeads];
    uint8_t masks[kStages][kChunk];
  };
  static constexpr int kBytes = kQueryBytes + kStages * kStage + sizeof(Small);
};

template <int DIM>
__global__ __launch_bounds__(kThreads, 1) void attend_portable(const AttendParams p, const Slice slice) {
  using S = Shape<DIM>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* ring = shared + S::kQueryBytes;
  auto& small = *reinterpret_cast<typename S::Small*>(ring + kStages * S::kStage);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_slice = warp % kSlices, part = warp / kSlices;
  const Item item = item_at(p, slice, blockIdx.x);
  const Part list = part_of(p, item.split, item.list[0], item.list[1]);
  const Bf16 *k = head_of(p, p.k, item.head), *v = head_of(p, p.v, item.head);
  const int shift = __ffs(p.ratio) - 1, chunks = chunks_of(p, list);

  const int mine = warp * kTokens + min(lane, kTokens - 1);
  const auto entry = [&](int chunk) {
    const int i = list.begin + ((chunk * kChunk + mine) >> shift);
    return i < list.end ? static_cast<uint32_t>(item.list[2 + i]) : 0;
  };
  uint32_t next = entry(0);
  const auto issue = [&](int chunk) {
    if (chunk < chunks) {
      const int at = chunk * kChunk + mine;
      const Token token =
          token_of(p, list, p.position + item.first, list.begin + (at >> shift), next, at & (p.ratio - 1));
      next = entry(chunk + 1);
      const uint32_t stage = shared_address(ring + chunk % kStages * S::kStage);
      const uint32_t present = __ballot_sync(~0u, token.rows != 0);
      if (lane < kTokens) small.masks[chunk % kStages][mine] = static_cast<uint8_t>(token.rows);
      gather<DIM, kTokens, kChunk>(stage, warp * kTokens, k, token.units, 0, present);
      gather<DIM, kTokens, kChunk>(stage + S::kHalf, warp * kTokens, v, token.units, 0, present);
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int chunk = 0; chunk < kStages - 1; ++chunk) issue(chunk);
  load_queries<DIM, kTileHeads, kThreads>(p, item, shared, threadIdx.x);

  constexpr int kTiles = kColumns / 8;
  float o[DIM / 8][4] = {};
  Running running;
  const int m = row_slice * 16 + lane / 4, group = p.group();
  const uint32_t rows[2] = {row_bit(m, group), row_bit(m + 8, group)};
  const int column = part * kColumns;
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
      mma::load(a, queries + tile_offset<kTileHeads>(row_slice * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        uint32_t b[4];
        const int row = column + 8 * t + lane % 8 + lane / 16 * 8;
        mma::load(b, keys + tile_offset<kChunk>(row, 2 * step + lane / 8 % 2));
        mma::multiply(s[t], a, b[0], b[1]);
        mma::multiply(s[t + 1], a, b[2], b[3]);
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
      const uint32_t a[4] = {probabilities[t][0], probabilities[t][1], probabilities[t + 1][0],
                             probabilities[t + 1][1]};
#pragma unroll
      for (int d = 0; d < DIM / 8; d += 2) {
        uint32_t b[4];
        mma::load_transposed(b, values + tile_offset<kChunk>(column + 8 * t + lane % 16, d + lane / 16));
        mma::multiply(o[d], a, b[0], b[1]);
        mma::multiply(o[d + 1], a, b[2], b[3]);
      }
    }
  }

  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* merged = reinterpret_cast<float*>(ring);
  mma::put_sums<DIM, kTileHeads>(merged, small.top, small.total, o, running, part, row_slice * 16);
  __syncthreads();
  mma::merge_sums<DIM, kTileHeads, kParts, kThreads>(p, slice, item_at(p, slice, blockIdx.x), merged, small.top,
                                                     small.total);
}

template <class Visit>
cudaError_t with_kernel(int dim, Visit visit) {
  if (dim == 64) return visit(attend_portable<64>, Shape<64>::kBytes);
  return dim == 128 ? visit(attend_portable<128>, Shape<128>::kBytes) : visit(attend_portable<256>, Shape<256>::kBytes);
}

}  // namespace

cudaError_t launch_portable(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  return with_kernel(params.dim, [&](auto kernel, int bytes) {
    const int64_t blocks = int64_t{slice.tiles} * params.kv_heads * params.splits;
    kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(params, slice);
    return cudaGetLastError();
  });
}

cudaError_t load_portable() {
  return load_all([](int dim, auto visit) { return with_kernel(dim, visit); });
}

}  // namespace jaxcp::qsa

// Selection by way of stored scores: see select.h.
#include "qsa/select_score.cuh"

namespace jaxcp::qsa {
namespace {

// One launch's rows and how they are dealt out: blockIdx.y is a tile of rows, blockIdx.x a share of the keys. In a tile
// of 64 rows each warp has 8 of them and takes every key; in a tile of 8 the warps take turns at stages.
struct Share {
  float* scores;
  int64_t stride;
  int32_t first_row, rows, tile_rows, keys;
};

struct Part {
  int32_t first_row, rows, first_key;  // of this block

  __device__ explicit Part(const Share& share)
      : first_row(share.first_row + static_cast<int32_t>(blockIdx.y) * share.tile_rows),
        rows(min(share.tile_rows, share.first_row + share.rows - first_row)),
        first_key(static_cast<int32_t>(blockIdx.x) * share.keys) {}
};

template <class S>
__device__ void store_part(const SelectParams& p, const Share& share, const Part& part, Stages& stages,
                           const uint8_t* buffers) {
  const bool in_turns = share.tile_rows == kWarpRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = (in_turns ? 0 : warp * kWarpRows) + lane / 4;
  float* const out = share.scores + (part.first_row + row - share.first_row) * share.stride + lane % 4 * S::kScores;
  QueryTile<S> q;  // of the rows of all requests
  q.load(p, part.first_row + row);
  TileRows tile(p, part.first_row, part.rows);
  uint32_t sequence = 0;
  while (tile.next()) {
    const int32_t limit = min(tile.limit, part.first_key + share.keys), seen = tile.seen(row);
    const int32_t needed = min(Warp().max(seen), limit);
    for (int32_t base = part.first_key; base < limit; base += kStageKeys, ++sequence) {
      if (in_turns && static_cast<int>(sequence % kWarps) != warp) continue;
      stages.wait_full(sequence);
      const uint32_t keys = shared_address(buffers + sequence % kStages * S::kStageBytes);
      for (int step = 0; step < kStageKeys && base + step < needed; step += S::kStepKeys) {
        Sums<S> sums;
        sums.multiply_by(q, keys + S::key_offset(step));
        if (seen == 0) continue;
#pragma unroll
        for (int i = 0; i < S::kScores; i += 2)
          *reinterpret_cast<float2*>(out + base + step + i) = make_float2(sums.score(i), sums.score(i + 1));
      }
      stages.release(sequence);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    store_scores(const __grid_constant__ SelectParams p, const __grid_constant__ Share share) {
  extern __shared__ __align__(128) uint8_t buffers[];
  __shared__ Stages stages;
  const Part part(share);
  stages.open(share.tile_rows == kWarpRows ? 32 : 32 * kWarps);
  if (threadIdx.x < kWarps * 32) {
    take_registers();
    store_part<S>(p, share, part, stages, buffers);
  } else {
    give_registers();
    TileRows tile(p, part.first_row, part.rows);
    uint32_t sequence = 0;
    while (tile.next()) {
      produce<S>(stages, buffers, sequence, Keys(p, tile.which, S::kRowBytes), part.first_key,
                 min(tile.limit, part.first_key + share.keys));
    }
  }
}

int32_t whole(int64_t n, int64_t unit) { return static_cast<int32_t>((n + unit - 1) / unit); }

// Keys per block such that a wave of blocks fills the device; two waves where rows alone nearly do.
int32_t keys_per_block(const SelectParams& p, int32_t row_tiles) {
  const int32_t stages = whole(p.blocks, kStageKeys), sms = multiprocessors();
  const int32_t shares = std::clamp(sms * (2 * row_tiles > sms ? 2 : 1) / row_tiles, 1, stages);
  return whole(stages, shares) * kStageKeys;
}

}  // namespace

cudaError_t launch_stored(const SelectParams& p, cudaStream_t stream) {
  Share share{static_cast<float*>(p.scratch), whole(p.blocks, kStageKeys) * int64_t{kStageKeys}};
  const int32_t at_once = static_cast<int32_t>(std::min<int64_t>(p.scratch_bytes / (share.stride * 4), p.rows));
  share.tile_rows = p.longest <= kWarpRows ? kWarpRows : kTileRows;
  for (share.first_row = 0; share.first_row < p.rows; share.first_row += at_once) {
    share.rows = std::min(at_once, p.rows - share.first_row);
    const int32_t row_tiles = whole(share.rows, share.tile_rows);
    share.keys = keys_per_block(p, row_tiles);
    const cudaError_t launched = with_shape<kMaxIndexHeads>(p.heads, p.dim, p.e4m3, [&]<class S>(S) {
      const dim3 grid(whole(p.blocks, share.keys), row_tiles);
      store_scores<S><<<grid, kThreads, S::kSharedBytes, stream>>>(p, share);
      return cudaGetLastError();
    });
    if (launched != cudaSuccess) return launched;
    const ScoredRows scored{share.scores,
                            share.stride,
                            p.position + share.first_row,
                            p.ids + int64_t{share.first_row} * p.k,
                            share.rows,
                            p.k,
                            p.ratio,
                            p.blocks};
    if (const cudaError_t error = launch_top_blocks(scored, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t load_stored() {
  return each_shape<kMaxIndexHeads>([]<class S>(S) {
    return cudaFuncSetAttribute(store_scores<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  });
}

}  // namespace jaxcp::qsa

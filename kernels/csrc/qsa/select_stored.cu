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
  TileRows tile(p, part.first_row, part.rows);
  uint32_t sequence = 0;
  while (tile.next()) {
    const int32_t limit = min(tile.limit, part.first_key + share.keys), seen = tile.seen(row);
    const int32_t needed = min(Warp().max(seen), limit);
    QueryTile<S> q;
    q.load(p, part.first_row + row);
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

// A row's selection, by one block. What a warp keeps of its part of the row follows what the warps before it keep.
template <int kBlockThreads, class Keys>
__global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads)
    top_blocks(const __grid_constant__ ScoredRows r) {
  using Search = Block<kBlockThreads, Keys>;
  __shared__ typename Search::Shared shared;
  int32_t* const ids = r.ids + int64_t{blockIdx.x} * r.k;
  const int32_t n = min((__ldg(r.position + blockIdx.x) + 1) / r.ratio, r.blocks);
  if (n <= r.k) {
    for (int32_t i = threadIdx.x; i < r.k; i += kBlockThreads) ids[i] = i < n ? i : -1;
    return;
  }
  const Keys keys(reinterpret_cast<const uint32_t*>(r.scores + blockIdx.x * r.stride), n);
  Search block{shared, keys};
  const Cut cut = find_cut(block, r.k, r.k);
  const Warp& warp = block.warp;
  int32_t above = 0, tied = 0;
  keys.part([&](uint32_t key) { above += key > cut.key, tied += key == cut.key; });
  above = warp.sum(above), tied = warp.sum(tied);
  __syncthreads();  // the search's sums have been read
  if (warp.lane == 0) shared.first[block.thread / 32] = above, shared.second[block.thread / 32] = tied;
  __syncthreads();
  const int32_t tied_before = block.before_warp(shared.second);
  Places places{block.before_warp(shared.first) + min(tied_before, cut.ties), cut.ties - tied_before};
  keys.in_order([&](int32_t id, int32_t key) {
    const auto at_cut = static_cast<int32_t>(cut.key);
    const int32_t place = places.take(warp, key > at_cut, key == at_cut);
    if (place >= 0) ids[place] = id;
  });
}

// Calls visit(kernel, threads, most blocks) for the kernels of a row, the best first. A few rows have all a processor's
// threads, whose time is instructions rather than loads: registers do not pay.
template <class Visit>
cudaError_t each_top_blocks(bool few_rows, Visit visit) {
  constexpr int32_t kAny = 0x7FFFFFFF;
  if (few_rows) return visit(top_blocks<1024, InMemory<1024>>, 1024, kAny);
  if (auto error = visit(top_blocks<512, InRegisters<512, 4>>, 512, InRegisters<512, 4>::kMost)) return error;
  if (auto error = visit(top_blocks<512, InRegisters<512, 16>>, 512, InRegisters<512, 16>::kMost)) return error;
  return visit(top_blocks<512, InMemory<512>>, 512, kAny);
}

int32_t whole(int64_t n, int64_t unit) { return static_cast<int32_t>((n + unit - 1) / unit); }

// Keys per block such that a wave of blocks fills the device; two waves where rows alone nearly do.
int32_t keys_per_block(const SelectParams& p, int32_t row_tiles) {
  const int32_t stages = whole(p.blocks, kStageKeys), sms = multiprocessors();
  const int32_t shares = std::clamp(sms * (2 * row_tiles > sms ? 2 : 1) / row_tiles, 1, stages);
  return whole(stages, shares) * kStageKeys;
}

}  // namespace

cudaError_t launch_top_blocks(const ScoredRows& r, cudaStream_t stream) {
  bool launched = false;
  return each_top_blocks(r.rows <= 2 * multiprocessors(), [&](auto kernel, int threads, int32_t most) {
    if (launched || r.blocks > most) return cudaSuccess;
    launched = true;
    kernel<<<r.rows, threads, 0, stream>>>(r);
    return cudaGetLastError();
  });
}

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
  for (const bool few_rows : {false, true}) {
    const cudaError_t error = each_top_blocks(few_rows, [](auto kernel, int, int32_t) {
      cudaFuncAttributes found;
      return cudaFuncGetAttributes(&found, kernel);
    });
    if (error != cudaSuccess) return error;
  }
  return each_shape<kMaxIndexHeads>([]<class S>(S) {
    return cudaFuncSetAttribute(store_scores<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  });
}

}  // namespace jaxcp::qsa

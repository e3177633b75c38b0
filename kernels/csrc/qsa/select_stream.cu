// Selection without storing scores: see select.h.
#include "qsa/select_score.cuh"

namespace jaxcp::qsa {
namespace {

struct alignas(8) Candidate {
  int32_t key;  // bits of the score; scores are sums of positive parts, so they order as integers
  int32_t id;
};

constexpr int kPerLane = kCandidates / 32;

// What a thread knows of its row (all four threads of a row the same): the list so far, and the key to beat.
struct Row {
  Candidate* list;
  int32_t count = 0;
  int32_t threshold = -1;  // the k-th largest key of the list is at least this
  int32_t visible = 0;
};

// Puts `c` there and moves on, if the bit is set: predicated, since as a branch some lane of a warp nearly always takes
// it.
__device__ __forceinline__ void push_if(uint32_t bit, Candidate*& to, Candidate c) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p st.global.v2.b32 [%0], {%2, %3};\n"
      "@p add.u64 %0, %0, 8;\n}"
      : "+l"(to)
      : "r"(bit), "r"(c.key), "r"(c.id)
      : "memory");
}

// Appends those of this thread's scores of the step from key `step` on that beat the threshold, in order of ids over
// the row's threads.
template <class S>
__device__ __forceinline__ void append(Row& row, const Sums<S>& sums, int32_t step) {
  constexpr int kScores = S::kScores;
  const int32_t first_id = step + static_cast<int32_t>(threadIdx.x) % 4 * kScores;
  int32_t key[kScores];
  uint32_t hits = 0;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    key[i] = __float_as_int(sums.score(i));
    hits |= (key[i] > row.threshold ? 1u : 0u) << i;
  }
  const int32_t left = row.visible - first_id;
  if (left < kScores) hits &= (1u << max(left, 0)) - 1;
  const int shift = threadIdx.x % 4 * 8;
  uint32_t counts = __popc(hits) << shift;  // a byte per thread of the row, then sums up to each
  counts |= __shfl_xor_sync(Warp::kAll, counts, 1);
  counts |= __shfl_xor_sync(Warp::kAll, counts, 2);
  counts *= 0x01010101u;
  Candidate* to = row.list + (row.count + (counts >> shift & 0xFF) - __popc(hits));
  row.count += counts >> 24;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    push_if(hits & 1u << i, to, {key[i], first_id + i});
  }
}

// The keys of a list in a warp's registers, in order of ids: place 32 j + lane is key[j].
struct Loaded {
  const Candidate* mine;  // this lane's first place
  int32_t left;           // places from there on
  int32_t key[kPerLane];

  __device__ Loaded(const Candidate* list, int32_t count)
      : mine(list + threadIdx.x % 32), left(count - static_cast<int32_t>(threadIdx.x % 32)) {
    __syncwarp();  // what other lanes appended is there
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) key[j] = j * 32 < left ? mine[j * 32].key : -1;
  }

  // write(place, key, id) of each kept one; returns how many. The list itself may be written: places only go down, and
  // ids are read some steps at a time, before what is kept of them is written.
  template <class Write>
  __device__ int32_t keep(const Cut& cut, Write write) const {
    constexpr int kAtOnce = 8;
    const Warp warp;
    const auto bound = static_cast<int32_t>(cut.key);
    Places places{0, cut.ties};
#pragma unroll
    for (int first = 0; first < kPerLane; first += kAtOnce) {
      int32_t id[kAtOnce];
#pragma unroll
      for (int j = first; j < first + kAtOnce; ++j) id[j - first] = j * 32 < left ? mine[j * 32].id : 0;
      __syncwarp();
#pragma unroll
      for (int j = first; j < first + kAtOnce; ++j) {
        const int32_t place = places.take(warp, key[j] > bound, key[j] == bound);
        if (place >= 0) write(place, key[j], id[j - first]);
      }
    }
    return places.next;
  }
};

// Cuts the lists of a warp's rows that have no room for another step back to about k.
template <class S>
__device__ __forceinline__ void make_room(Row& row, int32_t k, uint32_t* bins) {
  const uint32_t leaders = __ballot_sync(Warp::kAll, row.count > kCandidates - S::kStepKeys) & 0x11111111u;
  for (uint32_t left = leaders; left != 0; left &= left - 1) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    Candidate* const list = row.list + (leader / 4 - static_cast<int>(threadIdx.x % 32) / 4) * kCandidates;
    const Loaded loaded(list, __shfl_sync(Warp::kAll, row.count, leader));
    Lanes<kPerLane> lanes{loaded.key, bins};
    const Cut cut = find_cut(lanes, k, k + (kCandidates - k) / 8);
    const int32_t kept = loaded.keep(cut, [&](int32_t place, int32_t key, int32_t id) { list[place] = {key, id}; });
    __syncwarp();
    if (threadIdx.x % 32 / 4 == leader / 4) row.count = kept, row.threshold = static_cast<int32_t>(cut.bar());
  }
}

// Ids of the k best of each row that saw anything.
__device__ inline void write_best(const Row& row, int32_t* ids, int32_t k, uint32_t* bins) {
  for (int r = 0; r < kWarpRows; ++r) {
    if (__shfl_sync(Warp::kAll, row.visible, r * 4) == 0) continue;
    const Candidate* const list = row.list + (r - static_cast<int>(threadIdx.x % 32) / 4) * kCandidates;
    const int32_t count = __shfl_sync(Warp::kAll, row.count, r * 4);
    const Loaded loaded(list, count);
    Lanes<kPerLane> lanes{loaded.key, bins};
    const Cut cut = count > k ? find_cut(lanes, k, k) : Cut{0xFFFFFFFFu, 0};
    loaded.keep(cut, [&](int32_t place, int32_t, int32_t id) { ids[int64_t{r} * k + place] = id; });
  }
}

// The tiles of rows that a block takes. Later tiles see more keys: dealt out from the last one, there and back.
struct Turns {
  int32_t tiles, round = 0;

  __device__ explicit Turns(int32_t rows) : tiles((rows + kTileRows - 1) / kTileRows) {}
  // The next one, or -1.
  __device__ int32_t next() {
    const int32_t blocks = static_cast<int32_t>(gridDim.x), mine = static_cast<int32_t>(blockIdx.x);
    const int32_t turn = round * blocks + (round % 2 == 0 ? mine : blocks - 1 - mine);
    ++round;
    return turn < tiles ? tiles - 1 - turn : -1;
  }
};

// One request's rows of a tile: a warp's 8 against all keys.
template <class S>
__device__ __forceinline__ void stream_rows(Row& row, int32_t limit, const QueryTile<S>& q, int32_t k, Stages& stages,
                                            const uint8_t* buffers, uint32_t* bins, uint32_t& sequence) {
  const int32_t needed = Warp().max(row.visible);
  for (int32_t base = 0; base < limit; base += kStageKeys, ++sequence) {
    stages.wait_full(sequence);
    const uint32_t keys = shared_address(buffers + sequence % kStages * S::kStageBytes);
    for (int step = 0; step < kStageKeys && base + step < needed; step += S::kStepKeys) {
      Sums<S> sums;
      sums.multiply_by(q, keys + S::key_offset(step));
      append(row, sums, base + step);
      make_room<S>(row, k, bins);
    }
    stages.release(sequence);
  }
}

template <class S>
__device__ void stream_tiles(const SelectParams& p, Stages& stages, const uint8_t* buffers, uint32_t* bins) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Candidate* const lists = static_cast<Candidate*>(p.scratch) + int64_t{blockIdx.x} * kTileRows * kCandidates;
  uint32_t sequence = 0;
  Turns turns(p.rows);
  for (int32_t t = turns.next(); t >= 0; t = turns.next()) {
    TileRows tile(p, t * kTileRows, min(kTileRows, p.rows - t * kTileRows));
    const int32_t first_row = t * kTileRows + warp * kWarpRows;
    int32_t* const ids = p.ids + int64_t{first_row} * p.k;
    for (int r = 0; r < kWarpRows; ++r) {
      const int32_t v = tile.of(tile.visible, warp * kWarpRows + r);
      if (first_row + r < p.rows && v <= p.k) write_all(ids + int64_t{r} * p.k, v, p.k);
    }
    while (tile.next()) {
      Row row{lists + (warp * kWarpRows + lane / 4) * kCandidates};
      row.visible = tile.seen(warp * kWarpRows + lane / 4);
      QueryTile<S> q;
      q.load(p, first_row + lane / 4);
      stream_rows<S>(row, tile.limit, q, p.k, stages, buffers, bins, sequence);
      write_best(row, ids, p.k, bins);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) stream_blocks(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(128) uint8_t buffers[];
  __shared__ Stages stages;
  __shared__ alignas(16) uint32_t bins[kWarps][Lanes<kPerLane>::kDigits];
  stages.open(32 * kWarps);
  if (threadIdx.x < kWarps * 32) {
    take_registers();
    stream_tiles<S>(p, stages, buffers, bins[threadIdx.x / 32]);
  } else {
    give_registers();
    uint32_t sequence = 0;
    Turns turns(p.rows);
    for (int32_t t = turns.next(); t >= 0; t = turns.next()) {
      TileRows tile(p, t * kTileRows, min(kTileRows, p.rows - t * kTileRows));
      while (tile.next()) produce<S>(stages, buffers, sequence, Keys(p, tile.which, S::kRowBytes), 0, tile.limit);
    }
  }
}

}  // namespace

cudaError_t launch_streaming(const SelectParams& p, cudaStream_t stream) {
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t lists = p.scratch_bytes / kStreamBytes;
  const unsigned grid = static_cast<unsigned>(std::min({tiles, lists, int64_t{multiprocessors()}}));
  return with_shape<kMaxStreamedHeads>(p.heads, p.dim, p.e4m3, [&]<class S>(S) {
    stream_blocks<S><<<grid, kThreads, S::kSharedBytes, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t load_streaming() {
  return each_shape<kMaxStreamedHeads>([]<class S>(S) {
    return cudaFuncSetAttribute(stream_blocks<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  });
}

}  // namespace jaxcp::qsa

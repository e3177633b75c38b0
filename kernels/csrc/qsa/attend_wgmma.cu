// The attention kernel for Hopper: warpgroup MMA over tiles.
//
// A resident block of three warpgroups takes items in turn. One gathers; two compute, the chunks 2j + w of an item's
// list warpgroup w's, each with softmax sums and an output of its own for all 64 MMA rows; so the tensor cores have
// one's MMAs while the other is in its softmax. At the end of an item they swap sums, each those of half the rows, and
// each merges the other half.
//
// RING. What an item needs passes through kStages places in this order: its queries (64 rows, like a chunk), which the
// computing warps scale into a buffer of their own; then for j = 0, 1 ...: K(2j), K(2j+1), V(2j), V(2j+1), an odd last
// chunk paired with an empty one; then two places that stay empty, through which the outputs are swapped. So the next
// item's queries and first chunks are on their way while an item ends.
//   full[place]   128 gathering threads when their copies have landed, and 4 warps when their masks are written
//   empty[place]  4 warps that are done with it: those of the warpgroup whose chunk it was (an output: that read it;
//                 queries: warpgroup 0, when both have read them)
// A warpgroup holds two places at most, so the gathering one is never blocked by a place that waits for a later one.
#include "attend.h"
#include "attend_hopper.cuh"
#include "attend_softmax.cuh"
#include "attend_walk.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kThreads = 384, kGroupThreads = 128;
constexpr int kItemBarrier = 1;

template <int DIM>
struct Shape {
  static constexpr int kGatherRegisters = DIM == 256 ? 56 : 88, kComputeRegisters = DIM == 256 ? 224 : 208;
  static constexpr int kStages = DIM == 256 ? 6 : 8;
  static constexpr int kStage = kChunk * DIM * 2, kQueryBytes = kTileHeads * DIM * 2;
  struct Small {
    float top[kTileHeads], total[kTileHeads];  // given away
    uint64_t full[kStages], empty[kStages];
    uint8_t masks[kStages][kChunk];
    int chunks[kStages];  // of the item whose queries a place holds
  };
  static constexpr int kBytes = kQueryBytes + kStages * kStage + sizeof(Small) + 1024;  // 1024: alignment
};

// A place of the ring, and how often the ring went round.
template <int STAGES>
struct Cursor {
  int stage = 0;
  uint32_t round = 0;
  __device__ void advance(int n) {
    stage += n;
    if (stage >= STAGES) stage -= STAGES, round ^= 1;
  }
  __device__ Cursor ahead(int n) const {
    Cursor later = *this;
    later.advance(n);
    return later;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <int DIM>
struct Block {
  using S = Shape<DIM>;
  using At = Cursor<S::kStages>;
  uint8_t* queries;
  uint8_t* ring;
  typename S::Small& small;

  __device__ uint32_t place(At at) const { return shared_address(ring) + at.stage * S::kStage; }
  __device__ uint32_t full(At at) const { return shared_address(&small.full[at.stage]); }
  __device__ uint32_t empty(At at) const { return shared_address(&small.empty[at.stage]); }
  __device__ void wait_full(At at) const { hopper::wait(full(at), at.round); }
  __device__ void release(At at) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(empty(at));
  }
};

// Queries of an item, a row for each (row, head); 16 rows per warp.
template <int DIM>
__device__ __forceinline__ void gather_queries(const AttendParams& p, const Item& item, const Block<DIM>& block,
                                               typename Block<DIM>::At at, int chunks) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % kGroupThreads / 32 * 16;
  const int64_t row = result_row(p, item, first + lane % 16);
  const uint32_t present = __ballot_sync(~0u, row >= 0);
  hopper::wait(block.empty(at), at.round ^ 1);
  if (threadIdx.x % kGroupThreads == 0) block.small.chunks[at.stage] = chunks;
  const uint32_t units = row >= 0 ? static_cast<uint32_t>(row) * (DIM / 8) : 0;
  gather<DIM, 16, kTileHeads>(block.place(at), first, static_cast<const Bf16*>(p.q), units, 0, present);
  hopper::arrive_copied(block.full(at));
  if (lane == 0) hopper::arrive(block.full(at));
}

// The gathering warpgroup. A warp copies 16 tokens of every chunk; its lanes hold those of a pair of chunks. What an
// item begins with, the lengths of its list, is read while the item before it is gathered.
template <int DIM>
__device__ void gather_items(const AttendParams& p, const Slice& slice, const Block<DIM>& block, uint32_t items) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, half = lane / 16;
  const int shift = __ffs(p.ratio) - 1, first = thread / 32 * 16, mine = half * kChunk + first + lane % 16;
  typename Block<DIM>::At at;
  Item item = item_at(p, slice, blockIdx.x);
  int complete = item.list[0], tails = item.list[1];
  for (uint32_t index = blockIdx.x; index < items; index += gridDim.x) {
    const Item next_item = item_at(p, slice, min(index + gridDim.x, items - 1));
    const int next_complete = next_item.list[0], next_tails = next_item.list[1];
    const Part part = part_of(p, item.split, complete, tails);
    const Bf16 *k = head_of(p, p.k, item.head), *v = head_of(p, p.v, item.head);
    const int chunks = chunks_of(p, part), pairs = (chunks + 1) / 2;
    const auto entry = [&](int pair) {
      const int i = part.begin + ((2 * pair * kChunk + mine) >> shift);
      return i < part.end ? static_cast<uint32_t>(item.list[2 + i]) : 0;
    };
    uint32_t next = entry(0);
    gather_queries<DIM>(p, item, block, at, chunks);
    at.advance(1);
    for (int pair = 0; pair < pairs; ++pair) {
      const int position = 2 * pair * kChunk + mine;
      const Token token =
          token_of(p, part, p.position + item.first, part.begin + (position >> shift), next, position & (p.ratio - 1));
      const uint32_t present = __ballot_sync(~0u, token.rows != 0);
      next = entry(pair + 1);
#pragma unroll
      for (int turn = 0; turn < 4; ++turn) {  // K of both chunks, V of both
        const int which = turn % 2;
        hopper::wait(block.empty(at), at.round ^ 1);
        if (turn < 2 && half == which)
          block.small.masks[at.stage][first + lane % 16] = static_cast<uint8_t>(token.rows);
        if (2 * pair + which < chunks) {
          gather<DIM, 16, kChunk>(block.place(at), first, turn < 2 ? k : v, token.units, which * 16,
                                  present >> which * 16);
        }
        hopper::arrive_copied(block.full(at));
        __syncwarp();
        if (lane == 0) hopper::arrive(block.full(at));
        at.advance(1);
      }
    }
    for (int swap = 0; swap < 2; ++swap, at.advance(1)) {
      hopper::wait(block.empty(at), at.round ^ 1);
      hopper::arrive_copied(block.full(at));
      if (lane == 0) hopper::arrive(block.full(at));
    }
    item = next_item, complete = next_complete, tails = next_tails;
  }
}

// A computing warpgroup's sums over its chunks of an item.
template <int DIM>
struct Sums {
  float o[DIM / 64][8][4];
  Running running;
};

template <int DIM>
__device__ __forceinline__ void start_scores(const Block<DIM>& block, typename Block<DIM>::At at, float (&s)[8][4],
                                             uint32_t (&masks)[8]) {
  block.wait_full(at);
  hopper::publish();
  const uint64_t queries = hopper::operand(shared_address(block.queries)), keys = hopper::operand(block.place(at));
  hopper::begin();
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    const int offset = (step / 4 * kChunk * 128 + step % 4 * 32) >> 4;  // kTileHeads == kChunk: the same in both
    hopper::multiply(s, queries + offset, keys + offset, step > 0);
  }
  hopper::commit();
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    masks[t] = *reinterpret_cast<const uint16_t*>(&block.small.masks[at.stage][8 * t + threadIdx.x % 4 * 2]);
  }
}

template <int DIM>
__device__ __forceinline__ void start_values(const Block<DIM>& block, typename Block<DIM>::At at,
                                             const uint32_t (&a)[8][2], float (&o)[DIM / 64][8][4]) {
  block.wait_full(at);
  hopper::publish();
  const uint64_t values = hopper::operand(block.place(at));
  hopper::begin();
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
#pragma unroll
    for (int g = 0; g < DIM / 64; ++g) {
      hopper::multiply(o[g], a[2 * step][0], a[2 * step][1], a[2 * step + 1][0], a[2 * step + 1][1],
                       values + ((g * kChunk * 128 + step * 16 * 128) >> 4));
    }
  }
  hopper::commit();
}

// Takes in the scores of a chunk, adds its values, and, unless it is the LAST, starts the scores of the next one behind
// them: no MMA of this warpgroup waits for another but through its data. (A branch around the start instead would make
// the compiler serialise all MMAs.) Nothing is under way afterwards.
template <int DIM, bool LAST>
__device__ __forceinline__ void step(const Block<DIM>& block, typename Block<DIM>::At& at, int wg,
                                     const uint32_t (&rows)[2], float (&s)[8][4], uint32_t (&masks)[8],
                                     Sums<DIM>& sums) {
  const auto keys = at.ahead(wg), values = at.ahead(2 + wg);
  block.release(keys);
  uint32_t a[8][2];
  float shrink[2];
  if (take_scores(s, masks, rows, sums.running, shrink, a)) {
#pragma unroll
    for (int g = 0; g < DIM / 64; ++g) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sums.o[g][t][0] *= shrink[0], sums.o[g][t][1] *= shrink[0];
        sums.o[g][t][2] *= shrink[1], sums.o[g][t][3] *= shrink[1];
      }
    }
  }
  start_values<DIM>(block, values, a, sums.o);
  at.advance(4);
  if constexpr (!LAST) start_scores<DIM>(block, at.ahead(wg), s, masks);
  hopper::finish<0>();
  block.release(values);
}

// Warpgroup `wg` over its chunks; `at` is the item's first place and moves behind its last chunk.
template <int DIM>
__device__ __forceinline__ void compute(const Block<DIM>& block, typename Block<DIM>::At& at, int wg, int chunks,
                                        const uint32_t (&rows)[2], Sums<DIM>& sums) {
  const int own = (chunks + 1 - wg) / 2, pairs = (chunks + 1) / 2;
  if (own > 0) {
    float s[8][4];
    uint32_t masks[8];
    start_scores<DIM>(block, at.ahead(wg), s, masks);
    hopper::finish<0>();
    for (int i = 1; i < own; ++i) step<DIM, false>(block, at, wg, rows, s, masks, sums);
    step<DIM, true>(block, at, wg, rows, s, masks, sums);
  }
  if (own < pairs) {
    for (const int place : {wg, 2 + wg}) {
      block.wait_full(at.ahead(place));
      block.release(at.ahead(place));
    }
    at.advance(4);
  }
}

// a or b; left to itself the compiler indexes registers instead, which puts them into memory.
__device__ __forceinline__ float either(bool first, float a, float b) {
  float y;
  asm("{.reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %2, %3, p;}"
      : "=f"(y)
      : "r"(static_cast<uint32_t>(first)), "f"(a), "f"(b));
  return y;
}

// Results of the eight MMA rows of a warp, on their way out through its part of a place of the ring: lines of 256 bytes
// that are 1024 apart. So a row and its gates pass in whole lines, and the code is short: what an item ends with has
// left the instruction cache by then (with rows written and gated from where they were summed, an item took 5 us more).
template <int DIM>
struct Outgoing {
  static constexpr int kRowBytes = DIM * 4, kLanes = DIM / 8, kTurns = DIM / 32;  // fp32; lanes a row, 8 dims each
  uint8_t* part;

  // Where the values from `dim` on of a row are; neighbouring rows have theirs on distinct banks.
  __device__ float* at(int row, int dim) const {
    const int byte = row * kRowBytes + (dim / 4 ^ row) * 16;
    return reinterpret_cast<float*>(part + byte / 256 * 1024 + byte % 256) + dim % 4;
  }
  static __device__ int row(int turn) { return turn * (32 / kLanes) + threadIdx.x % 32 / kLanes; }
  static __device__ int dim() { return threadIdx.x % kLanes * 8; }
};

// Warpgroup `wg` merges, of each 16 MMA rows of a warp, the eight from 8 wg on, gives the others' sums away, and writes
// its rows.
template <int DIM>
__device__ __forceinline__ void merge_and_write(const AttendParams& p, const Slice& slice, const Item& item,
                                                const Block<DIM>& block, typename Block<DIM>::At at, int wg,
                                                Sums<DIM>& sums) {
  using Out = Outgoing<DIM>;
  constexpr int kTiles = DIM / 8;
  const bool low = wg == 0;
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, warp = thread / 32;
  const int first = 16 * warp + 8 * wg, m = first + lane / 4, other_m = m + 8 - 16 * wg;
  const auto given = at.ahead(wg), taken = at.ahead(1 - wg);
  const auto place = [&](typename Block<DIM>::At of) { return block.ring + of.stage * Shape<DIM>::kStage; };
  Running& running = sums.running;
  finish(running);
  block.wait_full(given);
  float2* to = reinterpret_cast<float2*>(place(given)) + thread;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float (&x)[4] = sums.o[t / 8][t % 8];
    to[t * kGroupThreads] = make_float2(either(low, x[2], x[0]), either(low, x[3], x[1]));
  }
  if (lane % 4 == 0) {
    block.small.top[other_m] = either(low, running.top[1], running.top[0]);
    block.small.total[other_m] = either(low, running.total[1], running.total[0]);
  }
  uint4 gates[Out::kTurns];  // on their way before the warpgroups meet
#pragma unroll
  for (int turn = 0; turn < Out::kTurns; ++turn) {
    gates[turn] = gates_of(p, result_row(p, item, first + Out::row(turn)), Out::dim());
  }
  hopper::meet<kItemBarrier, 2 * kGroupThreads>();
  const float own_top = either(low, running.top[0], running.top[1]), other_top = block.small.top[m];
  const float top = fmaxf(own_top, other_top);
  float own = exp2_fast(own_top - finite(top)), others = exp2_fast(other_top - finite(top));
  const float total = own * either(low, running.total[0], running.total[1]) + others * block.small.total[m];
  const float norm = total == 0 ? 0 : 1 / total;
  own *= norm, others *= norm;
  if (lane % 4 == 0) write_lse(p, slice, item.split, result_row(p, item, m), finite(top) + log2f(total));
  const float2* from = reinterpret_cast<const float2*>(place(taken)) + thread;
  float2 o[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float (&x)[4] = sums.o[t / 8][t % 8];
    const float2 other = from[t * kGroupThreads];
    o[t].x = own * either(low, x[0], x[2]) + others * other.x;
    o[t].y = own * either(low, x[1], x[3]) + others * other.y;
  }
  const Out out{place(taken) + warp * 256};
  __syncwarp();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) *reinterpret_cast<float2*>(out.at(lane / 4, t * 8 + lane % 4 * 2)) = o[t];
  __syncwarp();
#pragma unroll
  for (int turn = 0; turn < Out::kTurns; ++turn) {
    const int row = Out::row(turn);
    const float4 front = *reinterpret_cast<const float4*>(out.at(row, Out::dim())),
                 back = *reinterpret_cast<const float4*>(out.at(row, Out::dim() + 4));
    const float x[8] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
    write(p, slice, item.split, result_row(p, item, first + row), Out::dim(), x, gates[turn]);
  }
  block.release(taken);
}

// Scales an item's queries into their buffer, for both computing warpgroups; number of the item's chunks.
template <int DIM>
__device__ __forceinline__ int take_queries(const AttendParams& p, const Block<DIM>& block,
                                            typename Block<DIM>::At at) {
  block.wait_full(at);
  const int chunks = block.small.chunks[at.stage];
  const auto* from = reinterpret_cast<const uint4*>(block.ring + at.stage * Shape<DIM>::kStage);
#pragma unroll
  for (int i = 0; i < kTileHeads * DIM / 8 / (2 * kGroupThreads); ++i) {
    const int unit = i * 2 * kGroupThreads + threadIdx.x;
    reinterpret_cast<uint4*>(block.queries)[unit] = scaled(from[unit], p.scale_log2e);
  }
  hopper::publish();
  hopper::meet<kItemBarrier, 2 * kGroupThreads>();
  if (threadIdx.x < kGroupThreads) block.release(at);
  return chunks;
}

template <int DIM>
__device__ void compute_items(const AttendParams& p, const Slice& slice, const Block<DIM>& block, uint32_t items) {
  const int wg = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, group = p.group();
  const int m = thread / 32 * 16 + thread % 32 / 4;
  const uint32_t rows[2] = {row_bit(m, group), row_bit(m + 8, group)};
  typename Block<DIM>::At at;
  for (uint32_t index = blockIdx.x; index < items; index += gridDim.x) {
    const int chunks = take_queries<DIM>(p, block, at);
    at.advance(1);
    Sums<DIM> sums{};
    compute<DIM>(block, at, wg, chunks, rows, sums);
    merge_and_write<DIM>(p, slice, item_at(p, slice, index), block, at, wg, sums);
    at.advance(2);
  }
}
#endif

template <int DIM>
__global__ __launch_bounds__(kThreads, 1) void attend_hopper(const AttendParams p, const Slice slice, uint32_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<DIM>;
  extern __shared__ uint8_t unaligned[];
  uint8_t* shared = unaligned + (-shared_address(unaligned) & 1023);
  Block<DIM> block{shared, shared + S::kQueryBytes,
                   *reinterpret_cast<typename S::Small*>(shared + S::kQueryBytes + S::kStages * S::kStage)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::kStages; ++stage) {
      hopper::init_barrier(shared_address(&block.small.full[stage]), kGroupThreads + 4);
      hopper::init_barrier(shared_address(&block.small.empty[stage]), 4);
    }
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kGroupThreads) {
    hopper::give_registers<S::kGatherRegisters>();
    gather_items<DIM>(p, slice, block, items);
  } else {
    hopper::take_registers<S::kComputeRegisters>();
    compute_items<DIM>(p, slice, block, items);
  }
#endif
}

template <class Visit>
cudaError_t with_kernel(int dim, Visit visit) {
  if (dim == 64) return visit(attend_hopper<64>, Shape<64>::kBytes);
  return dim == 128 ? visit(attend_hopper<128>, Shape<128>::kBytes) : visit(attend_hopper<256>, Shape<256>::kBytes);
}

}  // namespace

cudaError_t launch_hopper(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const uint32_t items = uint32_t(slice.tiles) * params.kv_heads * params.splits;  // below 2^31: problem()
  const uint32_t blocks = items < uint32_t(processors) ? items : processors;
  return with_kernel(params.dim, [&](auto kernel, int bytes) {
    kernel<<<blocks, kThreads, bytes, stream>>>(params, slice, items);
    return cudaGetLastError();
  });
}

cudaError_t load_hopper() {
  return load_all([](int dim, auto visit) { return with_kernel(dim, visit); });
}

}  // namespace jaxcp::qsa

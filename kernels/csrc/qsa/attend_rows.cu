// Rows that go alone, with at most 16 heads per KV head: a gather with little arithmetic (a row's heads fill one MMA of
// 16 rows), bound by how much is under way. So warps share nothing but the queries: each of 8 takes every eighth run of
// 16 tokens, through a ring of its own in which K and V take turns; there is no barrier between the first query and the
// merge of the warps' sums. 96 KiB are under way per multiprocessor.
#include "attend.h"
#include "attend_mma.cuh"
#include "attend_softmax.cuh"
#include "attend_walk.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRun = 16, kSlots = 3;

template <int DIM>
struct Shape {
  static constexpr int kSlot = kRun * DIM * 2, kRing = kWarps * kSlots * kSlot, kQueryBytes = 16 * DIM * 2;
  static constexpr int kPitch = DIM + 8;  // floats of a merged row: 8 rows' pairs fall on distinct banks
  static_assert(kWarps * 16 * kPitch * 4 <= kRing, "the merge takes the rings' place");
  struct Small {
    float top[kWarps][16], total[kWarps][16];
    int count;
  };
  static constexpr int kBytes = kQueryBytes + kRing + sizeof(Small);
};

// The block ids of a row, as this lane's token of each of its warp's runs; looked up two runs ahead, first the id and
// then its place.
struct Feed {
  const int32_t *ids, *table;
  int position, shift, complete, begin, end;

  __device__ int fetch(int token) const {
    const int index = begin + (token >> shift);
    if (index >= end) return -1;
    return index < complete ? ids[index] : (position + 1) >> shift;
  }
  // Units of the token (attend_walk.cuh); `there` is cleared if it is none.
  __device__ uint32_t resolve(const AttendParams& p, int token, int block, bool& there) const {
    const int index = begin + (token >> shift), place = token & (p.ratio - 1);
    there = index < end && (index < complete || place < tail_of(position, p.ratio));
    if (!there) return 0;
    return (slot_of(table, p.table_width, p.blocks_per_page(), block) * p.ratio + place) * (p.kv_heads * p.dim / 8);
  }
};

// Ids in front of the first -1; each thread looks at some.
__device__ int count_ids(const int32_t* ids, int width, int& count) {
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < width; i += kThreads) {
    if (ids[i] >= 0 && (i + 1 == width || ids[i + 1] < 0)) count = i + 1;
  }
  __syncthreads();
  return count;
}

__device__ Feed feed_of(const AttendParams& p, const Item& item, int& count) {
  Feed feed;
  feed.ids = p.blocks + item.first * p.width;
  feed.table = p.page_table + int64_t{p.request[item.first]} * p.table_width;
  feed.position = p.position[item.first], feed.shift = __ffs(p.ratio) - 1;
  feed.complete = count_ids(feed.ids, p.width, count);
  if (feed.position < 0) feed.complete = 0;
  const Part part = part_of(p, item.split, feed.complete, tail_of(feed.position, p.ratio) > 0);
  feed.begin = part.begin, feed.end = part.end;
  return feed;
}

// A warp's tokens of one run.
struct Run {
  uint32_t units, present;
};

template <int DIM>
__global__ __launch_bounds__(kThreads, 1) void attend_rows(const AttendParams p, const Slice slice) {
  using S = Shape<DIM>;
  extern __shared__ __align__(128) uint8_t shared[];
  auto& small = *reinterpret_cast<typename S::Small*>(shared + S::kQueryBytes + S::kRing);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Item item = item_at(p, slice, blockIdx.x);
  const Feed feed = feed_of(p, item, small.count);
  const Bf16 *k = head_of(p, p.k, item.head), *v = head_of(p, p.v, item.head);
  const uint32_t queries = shared_address(shared);
  const uint32_t ring = queries + S::kQueryBytes + warp * kSlots * S::kSlot;
  const int tokens = (feed.end - feed.begin) << feed.shift, all = (tokens + kRun - 1) / kRun;
  const int runs = (all - warp + kWarps - 1) / kWarps;

  const auto mine = [&](int run) { return (run * kWarps + warp) * kRun + lane % kRun; };
  int block = feed.fetch(mine(0));
  const auto look_up = [&](int run) {  // runs in order; fetches the next one's ids
    bool there;
    Run found;
    found.units = feed.resolve(p, mine(run), block, there);
    found.present = __ballot_sync(~0u, there);
    block = feed.fetch(mine(run + 1));
    return found;
  };
  const auto load = [&](const Bf16* head, int slot, int run, const Run& of) {
    if (run < runs) gather<DIM, kRun, kRun>(ring + slot * S::kSlot, 0, head, of.units, 0, of.present);
    asm volatile("cp.async.commit_group;");
  };
  Run now = look_up(0), next = look_up(1);
  load(k, 0, 0, now);
  load(v, 1, 0, now);
  load(k, 2, 1, next);
  load_queries<DIM, 16, kThreads>(p, item, shared, threadIdx.x);
  __syncthreads();

  float o[DIM / 8][4] = {};
  Running running;
  const uint32_t rows[2] = {1, 1};  // MMA rows behind the last head are never written
  int slot = 0;
  const auto free_slot = [&] {
    const int freed = slot;
    slot = slot == kSlots - 1 ? 0 : slot + 1;
    return freed;
  };
  for (int run = 0; run < runs; ++run) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 1));
    __syncwarp();
    float s[2][2][4] = {};  // even and odd steps apart: half as long a chain
    const uint32_t keys = ring + slot * S::kSlot;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      uint32_t a[4], b[4];
      mma::load(a, queries + tile_offset<16>(lane % 16, 2 * step + lane / 16));
      mma::load(b, keys + tile_offset<kRun>(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
      mma::multiply(s[step % 2][0], a, b[0], b[1]);
      mma::multiply(s[step % 2][1], a, b[2], b[3]);
    }
    uint32_t masks[2], probabilities[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][t][i] += s[1][t][i];
      const uint32_t bits = now.present >> (8 * t + lane % 4 * 2);
      masks[t] = (bits & 1) | (bits & 2) << 7;
    }
    __syncwarp();
    load(v, free_slot(), run + 1, next);
    float shrink[2];
    if (take_scores(s[0], masks, rows, running, shrink, probabilities)) {
#pragma unroll
      for (int t = 0; t < DIM / 8; ++t) {
        o[t][0] *= shrink[0], o[t][1] *= shrink[0], o[t][2] *= shrink[1], o[t][3] *= shrink[1];
      }
    }
    now = next, next = look_up(run + 2);
    asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 1));
    __syncwarp();
    const uint32_t values = ring + slot * S::kSlot;
    const uint32_t a[4] = {probabilities[0][0], probabilities[0][1], probabilities[1][0], probabilities[1][1]};
#pragma unroll
    for (int d = 0; d < DIM / 8; d += 2) {
      uint32_t b[4];
      mma::load_transposed(b, values + tile_offset<kRun>(lane % 16, d + lane / 16));
      mma::multiply(o[d], a, b[0], b[1]);
      mma::multiply(o[d + 1], a, b[2], b[3]);
    }
    __syncwarp();
    load(k, free_slot(), run + 2, next);
  }
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* merged = reinterpret_cast<float*>(shared + S::kQueryBytes);
  mma::put_sums<DIM, 16>(merged, small.top, small.total, o, running, warp, 0);
  __syncthreads();
  mma::merge_sums<DIM, 16, kWarps, kThreads>(p, slice, item, merged, small.top, small.total);
}

template <class Visit>
cudaError_t with_kernel(int dim, Visit visit) {
  if (dim == 64) return visit(attend_rows<64>, Shape<64>::kBytes);
  return dim == 128 ? visit(attend_rows<128>, Shape<128>::kBytes) : visit(attend_rows<256>, Shape<256>::kBytes);
}

}  // namespace

cudaError_t launch_rows(const AttendParams& params, const Slice& slice, cudaStream_t stream) {
  return with_kernel(params.dim, [&](auto kernel, int bytes) {
    const int64_t blocks = int64_t{slice.tiles} * params.kv_heads * params.splits;
    kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(params, slice);
    return cudaGetLastError();
  });
}

cudaError_t load_rows() {
  return load_all([](int dim, auto visit) { return with_kernel(dim, visit); });
}

}  // namespace jaxcp::qsa

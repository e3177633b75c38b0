// Writes into the paged cache; see store.h.
#include <cuda_fp8.h>

#include "head.cuh"
#include "store.h"

namespace jaxcp::qsa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // of a launch

// A layer that is not there is written nowhere, like a row that has no place.
__device__ bool has_layer(const Pages& at) { return __ldg(at.layer) >= 0 && __ldg(at.layer) < at.layers; }

__device__ int64_t place_in(const Pages& at, int32_t per_page, int32_t request, int32_t position) {
  return place_of(at.table, at.requests, at.width, at.pages, per_page, request, position);
}

__global__ __launch_bounds__(kThreads) void store_kv(const __grid_constant__ StoreKvParams p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.rows || !has_layer(p.at)) return;
  const int64_t place = place_in(p.at, p.at.page_size, p.request[row], p.position[row]);
  if (place < 0) return;
  const int64_t to = (__ldg(p.at.layer) * p.at.pages * p.at.page_size + place) * p.row_bytes;
  const auto *k = static_cast<const uint8_t*>(p.kv) + 2 * row * p.row_bytes, *v = k + p.row_bytes;
  auto *k_to = static_cast<uint8_t*>(p.k_pool) + to, *v_to = static_cast<uint8_t*>(p.v_pool) + to;
#pragma unroll 2
  for (int64_t i = threadIdx.x % 32 * 16; i < p.row_bytes; i += 512) {
    const uint4 key = __ldg(reinterpret_cast<const uint4*>(k + i)),
                value = __ldg(reinterpret_cast<const uint4*>(v + i));
    *reinterpret_cast<uint4*>(k_to + i) = key, *reinterpret_cast<uint4*>(v_to + i) = value;
  }
}

__device__ Run run_at(const StoreIndexParams& p, int32_t segment) {
  const auto field = [&](int32_t i) { return __ldg(p.runs + i * p.segments + segment); };
  return {field(0), field(1), field(2), field(3)};
}

// A request's ring: its raw keys and their (logical, temporal, height, width) positions; the dump's if it has none.
struct Ring {
  Bf16* keys;
  int4* positions;
  bool dump;

  __device__ Ring(const StoreIndexParams& p, const Run& run)
      : dump(run.request < 0 || run.request >= p.at.requests || run.count <= 0) {
    const int64_t row = __ldg(p.at.layer) * int64_t{p.at.requests + 1} + (dump ? 0 : run.request + 1);
    const int64_t slot = row * p.ring;
    keys = static_cast<Bf16*>(p.ring_keys) + slot * p.dim;
    positions = reinterpret_cast<int4*>(p.ring_positions) + slot;
  }
};

// The row nearest to one that lengths on the device may put anywhere.
__device__ int64_t there(const StoreIndexParams& p, int64_t row) { return max(int64_t{0}, min(row, p.rows - 1)); }
__device__ const Bf16* raw_key(const StoreIndexParams& p, int64_t row) {
  return static_cast<const Bf16*>(p.keys) + there(p, row) * p.dim;
}

template <int DIM>
__device__ void put_key(const StoreIndexParams& p, const Head<DIM>& key, int64_t place) {
  const int64_t to = __ldg(p.at.layer) * p.at.pages * (p.at.page_size / p.ratio) + place;
  if (!p.e4m3) {
    static_cast<uint4*>(p.pool)[to * Head<DIM>::kLanes + Head<DIM>::lane()] = key.mine.rounded();
    return;
  }
  uint2 bits;
  auto* byte = reinterpret_cast<uint8_t*>(&bits);
#pragma unroll
  for (int i = 0; i < 8; ++i) byte[i] = __nv_cvt_float_to_fp8(to_bf16(key.mine.x[i]), __NV_SATFINITE, __NV_E4M3);
  static_cast<uint2*>(p.pool)[to * Head<DIM>::kLanes + Head<DIM>::lane()] = bits;
}

// Compresses block `block` of a run, with `older(position)` where a token is older, and stores it; a group of lanes per
// block, none of them if !exists.
template <int DIM, class Older>
__device__ void compress(const StoreIndexParams& p, const Run& run, int32_t block, const float* cos, const float* sin,
                         bool exists, Older older) {
  using H = Head<DIM>;
  const Eight weight = H::weights(p.weight);
  const Turn turn(cos, sin, p.angles.pairs, H::lane());
  const int32_t per_page = p.at.page_size / p.ratio;
  const int64_t place = exists ? place_in(p.at, per_page, run.request, block) : -1;
  H mean{};
#pragma unroll 4
  for (int32_t member = 0; member < p.ratio; ++member) {
    const int32_t position = block * p.ratio + member, row = run.row_of(position);
    const Bf16* key = row < 0 ? older(position) : raw_key(p, row);
    const Eight x = Eight::of(reinterpret_cast<const uint4*>(key)[H::lane()]);  // rings are written by this kernel
#pragma unroll
    for (int i = 0; i < 8; ++i) mean.mine.x[i] = member == 0 ? x.x[i] : mean.mine.x[i] + x.x[i];
  }
#pragma unroll
  for (float& x : mean.mine.x) x = to_bf16(x * (1.f / p.ratio));
  mean.normalise(weight, p.eps);
  mean.template rotate<true>(turn);
  if (place >= 0) put_key<DIM>(p, mean, place);
}

// One request: the block that its prefix ends in, if it is complete now, then its ring. By a warp.
template <int DIM>
__device__ void store_request(const StoreIndexParams& p, int32_t segment) {
  using H = Head<DIM>;
  const int lane = threadIdx.x % 32;
  const Run run = run_at(p, segment);
  const Ring ring(p, run);
  if (run.straddles(p.ratio)) {
    const int32_t block = run.begun(p.ratio), older = run.prefix % p.ratio;
    const bool wrong = lane < older && ring.positions[(block * p.ratio + lane) % p.ring].x != block * p.ratio + lane;
    if (__any_sync(~0u, wrong) && lane == 0) atomicAdd(p.faults + 1, 1);
    const int64_t angles = int64_t{segment} * p.pending.pairs;
    compress<DIM>(p, run, block, p.pending.cos + angles, p.pending.sin + angles, lane < H::kLanes,
                  [&](int32_t position) { return ring.keys + int64_t{position % p.ring} * DIM; });
    __syncwarp();
  }
  if (ring.dump) return;
  constexpr int kAtOnce = 32 / H::kLanes;
  for (int32_t slot = lane / H::kLanes; slot < p.ring; slot += kAtOnce) {
    const int32_t position = newest_in_slot(run.total(), slot, p.ring);
    if (position < 0 || position < run.prefix) continue;
    const int64_t row = run.row_of(position);
    const auto* from = reinterpret_cast<const uint4*>(raw_key(p, row)) + H::lane();
    reinterpret_cast<uint4*>(ring.keys + int64_t{slot} * DIM)[H::lane()] = __ldg(from);
    if (H::lane() == 0) {
      const int64_t at = there(p, row);
      ring.positions[slot] = make_int4(position, p.rope[at], p.rope[p.rows + at], p.rope[2 * p.rows + at]);
    }
  }
}

// The segment of the nth of all finished blocks, and which of the segment's it is; -1 behind the last. By a warp, for
// the blocks of its groups of lanes.
struct Owner {
  int32_t segment = -1, nth = 0;
};
template <int GROUPS>
__device__ Owner owner_of(const StoreIndexParams& p, int64_t first) {
  const int lane = threadIdx.x % 32, group = lane / (32 / GROUPS);
  Owner owner;
  int64_t before = 0;
  for (int32_t base = 0; base < p.segments; base += 32) {
    int32_t own = base + lane < p.segments ? run_at(p, base + lane).blocks(p.ratio) : 0, upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int64_t wanted = first + g - before;
      const uint32_t behind = __ballot_sync(~0u, upto > wanted);
      const int found = __ffs(static_cast<int>(behind)) - 1;
      const int32_t start = __shfl_sync(~0u, upto - own, found < 0 ? 0 : found);
      if (g == group && owner.segment < 0 && found >= 0 && wanted >= 0) {
        owner = {base + found, static_cast<int32_t>(wanted - start)};
      }
    }
    before += __shfl_sync(~0u, upto, 31);
  }
  return owner;
}

// Blocks whose tokens are all new, a group of lanes each.
template <int DIM>
__device__ void store_blocks(const StoreIndexParams& p, int64_t warp) {
  constexpr int kGroups = 32 / Head<DIM>::kLanes;
  const Owner owner = owner_of<kGroups>(p, warp * kGroups);
  const Run run = run_at(p, max(owner.segment, 0));
  const bool exists = owner.segment >= 0 && !(owner.nth == 0 && run.straddles(p.ratio));
  if (!__any_sync(~0u, exists)) return;
  const int32_t block = exists ? run.begun(p.ratio) + owner.nth : (run.prefix + p.ratio - 1) / p.ratio;
  const int64_t row =
      min(max(run.row_of(block * p.ratio), 0), static_cast<int32_t>(p.rows - 1)) * int64_t{p.angles.pairs};
  compress<DIM>(p, run, block, p.angles.cos + row, p.angles.sin + row, exists, [&](int32_t) { return raw_key(p, 0); });
}

template <int DIM>
__global__ __launch_bounds__(kThreads, 4) void store_index(const __grid_constant__ StoreIndexParams p) {
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (!has_layer(p.at)) return;
  if (warp < p.segments) return store_request<DIM>(p, static_cast<int32_t>(warp));
  store_blocks<DIM>(p, warp - p.segments);
}

template <class Visit>
cudaError_t with_dim(int dim, Visit visit) {
  if (dim == 64) return visit(store_index<64>);
  return dim == 128 ? visit(store_index<128>) : visit(store_index<256>);
}

int64_t blocks_of(const StoreIndexParams& p) {
  const int64_t groups = 32 / (p.dim / 8), most = p.rows / p.ratio + p.segments;
  return (p.segments + (most + groups - 1) / groups + kWarps - 1) / kWarps;
}

const char* problem(const Pages& at) {
  return at.requests < 1 || at.width < 1 || at.page_size < 1 || at.layers < 1 || at.pages < 1 ? "sizes must be positive"
                                                                                              : nullptr;
}

}  // namespace

const char* problem(const StoreKvParams& p) {
  if (const char* why = problem(p.at)) return why;
  if (p.rows < 0 || p.row_bytes < 16 || p.row_bytes % 16 != 0) return "rows of K and V must have whole 16-byte units";
  return p.rows / kWarps >= kMostBlocks ? "too many rows" : nullptr;
}

const char* problem(const StoreIndexParams& p) {
  if (const char* why = problem(p.at)) return why;
  if (p.rows < 1 || p.segments < 1 || p.ratio < 1 || p.ring < p.ratio) return "sizes must be positive";
  if (p.ratio > 32) return "ratio must be at most 32";
  if (p.dim != 64 && p.dim != 128 && p.dim != 256) return "dim must be 64, 128 or 256";
  if (p.angles.pairs < 8 || p.angles.pairs % 8 != 0 || 2 * p.angles.pairs > p.dim ||
      p.pending.pairs != p.angles.pairs) {
    return "pairs must be a multiple of 8, and a key have 2 * pairs features";
  }
  if (p.at.page_size % p.ratio != 0) return "page_size must be a multiple of ratio";
  return blocks_of(p) >= kMostBlocks ? "too many rows" : nullptr;
}

cudaError_t launch_store(const StoreKvParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  store_kv<<<static_cast<unsigned>((p.rows + kWarps - 1) / kWarps), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_store(const StoreIndexParams& p, cudaStream_t stream) {
  return with_dim(p.dim, [&](auto kernel) {
    kernel<<<static_cast<unsigned>(blocks_of(p)), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t load_store() {
  cudaFuncAttributes found;
  cudaError_t error = cudaFuncGetAttributes(&found, store_kv);
  for (const int dim : {64, 128, 256}) {
    if (error == cudaSuccess) error = with_dim(dim, [&](auto kernel) { return cudaFuncGetAttributes(&found, kernel); });
  }
  return error;
}

}  // namespace jaxcp::qsa

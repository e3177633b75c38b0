// Norm and rotation of heads; see heads.h.
#include <algorithm>

#include "head.cuh"
#include "heads.h"

namespace jaxcp::qsa {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 4;  // heads of a row that a group of lanes takes: their loads are under way together
constexpr int64_t kMostHeads = int64_t{1} << 31;

__host__ __device__ int runs_of(const Heads& of) { return (of.heads + kRun - 1) / kRun; }
__host__ __device__ int runs_per_block(const Heads& of) { return kThreads / (of.dim / 8); }

template <int DIM, bool IN_STEPS>
__device__ __forceinline__ void prepare_run(const PrepareParams& p, const Heads& of, uint32_t index) {
  using H = Head<DIM>;
  const uint32_t per_row = runs_of(of), last = static_cast<uint32_t>(p.rows) * per_row - 1;
  const uint32_t at = min(index, last), row = at / per_row, first = (at - row * per_row) * kRun;
  const int count = index > last ? 0 : min(kRun, static_cast<int>(of.heads - first));  // no lane may be missing
  const auto* from = static_cast<const Bf16*>(of.from) + row * of.row_stride + first * of.head_stride + 8 * H::lane();
  auto* to = static_cast<Bf16*>(of.to) + row * of.to_stride + first * DIM + 8 * H::lane();
  uint4 words[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    words[i] = i < count ? __ldg(reinterpret_cast<const uint4*>(from + i * of.head_stride)) : uint4{};
  if (of.weight != nullptr) {
    const Eight weight = H::weights(of.weight);
    const int64_t angles = int64_t{row} * p.angles.pairs;
    const Turn turn(p.angles.cos + angles, p.angles.sin + angles, p.angles.pairs, H::lane());
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      H head{Eight::of(words[i])};
      head.normalise(weight, p.eps);
      head.template rotate<IN_STEPS>(turn);
      words[i] = head.mine.rounded();
    }
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i < count) *reinterpret_cast<uint4*>(to + i * DIM) = words[i];
  }
}

template <int DIM>
__device__ __forceinline__ void prepare_some(const PrepareParams& p, const Heads& of) {
  const uint32_t index = blockIdx.x * (kThreads / Head<DIM>::kLanes) + threadIdx.x / Head<DIM>::kLanes;
  if (of.in_steps) {
    prepare_run<DIM, true>(p, of, index);
  } else {
    prepare_run<DIM, false>(p, of, index);
  }
}

__global__ __launch_bounds__(kThreads) void prepare_heads(const __grid_constant__ PrepareParams p) {
  const Heads& of = p.of[blockIdx.y];
  if (int64_t{blockIdx.x} * runs_per_block(of) >= p.rows * runs_of(of)) return;
  if (of.dim == 64) return prepare_some<64>(p, of);
  if (of.dim == 128) return prepare_some<128>(p, of);
  prepare_some<256>(p, of);
}

}  // namespace

const char* problem(const PrepareParams& p) {
  if (p.rows < 0 || p.kinds < 1 || p.kinds > kMostKinds) return "sizes must be positive";
  if (p.angles.pairs < 8 || p.angles.pairs % 8 != 0) return "pairs must be a multiple of 8";
  for (int kind = 0; kind < p.kinds; ++kind) {
    const Heads& of = p.of[kind];
    if (of.heads < 1) return "heads must be positive";
    if (of.dim != 64 && of.dim != 128 && of.dim != 256) return "dim must be 64, 128 or 256";
    if (2 * p.angles.pairs > of.dim) return "a head must have 2 * pairs features";
    if (of.row_stride % 8 != 0 || of.head_stride % 8 != 0 || of.to_stride % 8 != 0)
      return "heads must be 16 bytes apart";
    if (p.rows * of.heads >= kMostHeads) return "too many rows";
  }
  return nullptr;
}

cudaError_t launch_prepare(const PrepareParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  int64_t blocks = 0;
  for (int kind = 0; kind < params.kinds; ++kind) {
    const int per_block = runs_per_block(params.of[kind]);
    blocks = std::max(blocks, (params.rows * runs_of(params.of[kind]) + per_block - 1) / per_block);
  }
  prepare_heads<<<dim3(static_cast<unsigned>(blocks), params.kinds), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t load_prepare() {
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(&found, prepare_heads);
}

}  // namespace jaxcp::qsa

// mma.sync, ldmatrix, and the merge of warps' sums: what the two portable kernels share.
#pragma once

#include "attend_softmax.cuh"
#include "attend_walk.cuh"

namespace jaxcp::qsa::mma {

__device__ __forceinline__ void load(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// d [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's sums over its part of the tokens, for MMA rows m ... m + 15, into merged [parts][ROWS][DIM + 8].
template <int DIM, int ROWS>
__device__ __forceinline__ void put_sums(float* merged, float (*top)[ROWS], float (*total)[ROWS],
                                         const float (&o)[DIM / 8][4], Running running, int part, int m) {
  const int lane = threadIdx.x % 32;
  finish(running);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = m + lane / 4 + 8 * r;
    float* to = merged + (part * ROWS + row) * (DIM + 8) + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < DIM / 8; ++t)
      *reinterpret_cast<float2*>(to + 8 * t) = make_float2(o[t][2 * r], o[t][2 * r + 1]);
    if (lane % 4 == 0) top[part][row] = running.top[r], total[part][row] = running.total[r];
  }
}

// Merges the parts in order and writes the results.
template <int DIM, int ROWS, int PARTS, int THREADS>
__device__ __forceinline__ void merge_sums(const AttendParams& p, const Slice& slice, const Item& item,
                                           const float* merged, const float (*top)[ROWS], const float (*total)[ROWS]) {
  for (int i = threadIdx.x; i < ROWS * (DIM / 8); i += THREADS) {
    const int row = i / (DIM / 8), dim = i % (DIM / 8) * 8;
    const int64_t to = result_row(p, item, row);
    if (to < 0) break;
    const uint4 gates = gates_of(p, to, dim);
    float most = -INFINITY, sum = 0, x[8] = {};
#pragma unroll
    for (int j = 0; j < PARTS; ++j) most = fmaxf(most, top[j][row]);
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const float weight = exp2_fast(top[j][row] - finite(most));
      const auto* from = reinterpret_cast<const float4*>(merged + (j * ROWS + row) * (DIM + 8) + dim);
      const float4 y = from[0], z = from[1];
      sum += weight * total[j][row];
      x[0] += weight * y.x, x[1] += weight * y.y, x[2] += weight * y.z, x[3] += weight * y.w;
      x[4] += weight * z.x, x[5] += weight * z.y, x[6] += weight * z.z, x[7] += weight * z.w;
    }
    const float norm = sum == 0 ? 0 : 1 / sum;
#pragma unroll
    for (float& y : x) y *= norm;
    write(p, slice, item.split, to, dim, x, gates);
    if (dim == 0) write_lse(p, slice, item.split, to, finite(most) + log2f(sum));
  }
}

}  // namespace jaxcp::qsa::mma

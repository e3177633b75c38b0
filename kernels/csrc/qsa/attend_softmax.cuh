// Online softmax in base 2 on the accumulators of an MMA of 16 rows: a thread holds columns 2 (lane % 4) and the next
// of every 8 in two rows, lane / 4 and 8 more. mma.sync and wgmma share this layout, and as bf16 pairs it is that of
// operand A.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

namespace jaxcp::qsa {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Two rows' reference of the exponents and this thread's share of the sum of 2^(score - top).
//
// The reference follows the largest score only when that is more than kSlack above it: probabilities stay below
// 2^kSlack, far from where anything overflows, their rounding is relative and so the same, and outputs are rarely
// rescaled.
constexpr float kSlack = 8;
struct Running {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
};

// Bit of the tile row of MMA row `m`; none beyond the bits of a mask.
__device__ __forceinline__ uint32_t row_bit(int m, int group) {
  const int row = m / group;
  return row < 8 ? 1u << row : 0;
}

// A row without tokens has top -inf; its sums stay 0 instead of NaN.
__device__ __forceinline__ float finite(float top) { return top == -INFINITY ? 0 : top; }

// Takes the scores of TILES * 8 tokens in: masks them, updates `running`, gives the probabilities as operand A and what
// earlier outputs shrink by. masks[t] holds the tile rows of two tokens, a byte each; rows[i] this thread's two rows.
// Returns whether any row of the warp shrinks.
template <int TILES>
__device__ __forceinline__ bool take_scores(float (&s)[TILES][4], const uint32_t (&masks)[TILES],
                                            const uint32_t (&rows)[2], Running& running, float (&shrink)[2],
                                            uint32_t (&probabilities)[TILES][2]) {
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((masks[t] & rows[i / 2] << (i % 2 * 8)) == 0) s[t][i] = -INFINITY;
      top[i / 2] = fmaxf(top[i / 2], s[t][i]);
    }
  }
  bool moves = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    moves |= top[r] > running.top[r] + kSlack;
  }
  moves = __any_sync(~0u, moves);
  if (moves) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float higher = fmaxf(top[r], running.top[r]);
      shrink[r] = exp2_fast(running.top[r] - finite(higher));
      running.top[r] = higher;
      running.total[r] *= shrink[r];
    }
  }
  const float base[2] = {finite(running.top[0]), finite(running.top[1])};
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[t][i] = exp2_fast(s[t][i] - base[i / 2]);
    running.total[0] += s[t][0] + s[t][1];
    running.total[1] += s[t][2] + s[t][3];
    probabilities[t][0] = bf16_pair(s[t][0], s[t][1]);
    probabilities[t][1] = bf16_pair(s[t][2], s[t][3]);
  }
  return moves;
}

// Sums the threads' shares.
__device__ __forceinline__ void finish(Running& running) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    running.total[r] += __shfl_xor_sync(~0u, running.total[r], 1);
    running.total[r] += __shfl_xor_sync(~0u, running.total[r], 2);
  }
}

}  // namespace jaxcp::qsa

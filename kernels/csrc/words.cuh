// Words of a row: as numbers, as they travel, and how to keep the compiler from moving what is done with them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "protocol.h"

namespace jaxcp::device {

// Formats of rows. A word holds kPerWord numbers; add() adds them, weighted, to as many sums, and pack() rounds those.
struct BFloat16 {
  static constexpr int kPerWord = 2;
  __device__ static void add(float weight, uint32_t w, float* sums) {
    const float2 pair = {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
    sums[0] = fmaf(weight, pair.x, sums[0]);
    sums[1] = fmaf(weight, pair.y, sums[1]);
  }
  __device__ static uint32_t pack(const float* sums) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(sums[0], sums[1]);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

struct Float16 {
  static constexpr int kPerWord = 2;
  __device__ static void add(float weight, uint32_t w, float* sums) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(w));
    sums[0] = fmaf(weight, pair.x, sums[0]);
    sums[1] = fmaf(weight, pair.y, sums[1]);
  }
  __device__ static uint32_t pack(const float* sums) {
    const __half2 v = __floats2half2_rn(sums[0], sums[1]);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

struct Float32 {
  static constexpr int kPerWord = 1;
  __device__ static void add(float weight, uint32_t w, float* sums) {
    sums[0] = fmaf(weight, __uint_as_float(w), sums[0]);
  }
  __device__ static uint32_t pack(const float* sums) { return __float_as_uint(sums[0]); }
};

__device__ __forceinline__ bool any_blank(uint4 v) {
  return v.x == kBlank || v.y == kBlank || v.z == kBlank || v.w == kBlank;
}
__device__ __forceinline__ uint4 outgoing(uint4 v) {
  return {jaxcp::outgoing(v.x), jaxcp::outgoing(v.y), jaxcp::outgoing(v.z), jaxcp::outgoing(v.w)};
}
__device__ __forceinline__ uint4 splat(uint32_t w) { return {w, w, w, w}; }
// Weights need no subnormals; rounding to nearest is not needed either.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sanitized(float lse) { return lse < INFINITY ? lse : -INFINITY; }

}  // namespace jaxcp::device

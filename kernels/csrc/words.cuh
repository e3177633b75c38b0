// Words of a row: as numbers, as they travel, and how to keep the compiler from moving what is done with them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "protocol.h"

namespace jaxcp::device {

struct BFloat16 {
  __device__ static float2 unpack(uint32_t w) { return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)}; }
  __device__ static uint32_t pack(float x, float y) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

struct Float16 {
  __device__ static float2 unpack(uint32_t w) { return __half22float2(reinterpret_cast<const __half2&>(w)); }
  __device__ static uint32_t pack(float x, float y) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
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

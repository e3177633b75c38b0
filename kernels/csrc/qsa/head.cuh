// A head in registers: eight features in each of DIM / 8 neighbouring lanes, whose group a warp holds 32 / (DIM / 8)
// times. All lanes of a warp take part in everything.
#pragma once

#include <cuda_bf16.h>

#include "heads.h"

namespace jaxcp::qsa {

using Bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

struct Eight {
  float x[8];

  __device__ static Eight of(uint4 words) {
    Eight eight;
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      eight.x[2 * i] = pair.x, eight.x[2 * i + 1] = pair.y;
    }
    return eight;
  }
  __device__ static Eight load(const void* bf16) { return of(__ldg(static_cast<const uint4*>(bf16))); }
  __device__ static Eight load(const float* from) {
    Eight eight;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 y = __ldg(reinterpret_cast<const float4*>(from) + i);
      eight.x[4 * i] = y.x, eight.x[4 * i + 1] = y.y, eight.x[4 * i + 2] = y.z, eight.x[4 * i + 3] = y.w;
    }
    return eight;
  }
  __device__ uint4 rounded() const {
    uint4 words;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    return words;
  }
};

// Angles of the features of a lane, if they are rotated, and the lane that has their partners.
struct Turn {
  Eight cos{}, sin{};
  int partner;
  bool rotated, first;

  // By angles at `cos` and `sin`, [pairs] each, for `lane` of a head.
  __device__ Turn(const float* cos, const float* sin, int pairs, int lane) {
    const int apart = pairs / 8;  // lanes
    first = lane < apart, rotated = lane < 2 * apart;
    partner = static_cast<int>(threadIdx.x) % 32 + (first ? apart : rotated ? -apart : 0);
    const int at = 8 * (first ? lane : lane - apart);
    if (rotated) this->cos = Eight::load(cos + at), this->sin = Eight::load(sin + at);
  }
};

template <int DIM>
struct Head {
  static constexpr int kLanes = DIM / 8;
  Eight mine;

  __device__ static int lane() { return threadIdx.x % kLanes; }
  // A norm's weights of this lane's features.
  __device__ static Eight weights(const void* bf16) { return Eight::load(static_cast<const Bf16*>(bf16) + 8 * lane()); }

  // Zero-centred RMS norm, rounded.
  __device__ void normalise(const Eight& weight, float eps) {
    float squares = 0;
#pragma unroll
    for (const float x : mine.x) squares += x * x;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float scale = rsqrtf(squares * (1.f / DIM) + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) mine.x[i] = to_bf16(mine.x[i] * scale * (1 + weight.x[i]));
  }

  // Rotation of the leading features; not rounded in the end.
  template <bool IN_STEPS>
  __device__ void rotate(const Turn& by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float partner = __shfl_sync(~0u, mine.x[i], by.partner);
      const float cos = IN_STEPS ? to_bf16(by.cos.x[i]) : by.cos.x[i];
      const float sin = IN_STEPS ? to_bf16(by.sin.x[i]) : by.sin.x[i];
      float a = mine.x[i] * cos, b = partner * sin;
      if constexpr (IN_STEPS) a = to_bf16(a), b = to_bf16(b);
      if (by.rotated) mine.x[i] = by.first ? a - b : a + b;
    }
  }
};

}  // namespace jaxcp::qsa

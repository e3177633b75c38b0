// Inputs made on the device, and a float64 merge that judges outputs there: independent of the exchange's code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "protocol.h"

namespace jaxcp::test {

// What rows hold. `special` mixes in empty shards with NaN payloads, NaN and +inf LSEs, rows that are empty everywhere,
// and words equal to kBlank in shards that count.
enum class Fill { normal, special };

__host__ __device__ inline uint32_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(x >> 31);
}

__device__ inline float value(uint64_t seed, uint64_t index) {
  return static_cast<int32_t>(mixed(seed * 0x9E3779B97F4A7C15ull + index)) * 0x1p-30f;
}

// The largest relative rounding of a result, doubled.
__device__ inline double step_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 0x1p-23 : dtype == Dtype::bfloat16 ? 0x1p-8 : 0x1p-10;
}
__device__ inline uint16_t narrow(float x, Dtype dtype) {
  return dtype == Dtype::bfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
__device__ inline float widen(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::bfloat16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

__device__ inline double number(const void* data, int64_t i, Dtype dtype) {
  if (dtype == Dtype::float32) return static_cast<const float*>(data)[i];
  return widen(static_cast<const uint16_t*>(data)[i], dtype);
}
__device__ inline void set_number(void* data, int64_t i, float x, bool blank, Dtype dtype) {
  if (dtype == Dtype::float32) {
    static_cast<float*>(data)[i] = blank ? __uint_as_float(kBlank) : x;
  } else {
    static_cast<uint16_t*>(data)[i] = blank ? 0xFFFF : narrow(x, dtype);  // two make a word equal to kBlank
  }
}

// o [rows, dim] and lse [rows] of one rank, contiguous; a block per row.
__global__ void fill_rows(void* o, float* lse, int dim, Dtype dtype, Fill fill, uint64_t seed, int rank) {
  const int row = blockIdx.x;
  const uint64_t mine = seed * 64 + rank;
  const uint32_t kind = fill == Fill::normal ? 15 : mixed(mine * 77 + row) % 16;
  const bool empty_everywhere = fill == Fill::special && mixed(seed * 31 + row) % 8 == 0;
  float l = 6 * value(mine, ~uint64_t{0} - row);
  bool nan_payload = false;
  if (empty_everywhere || kind < 3) {
    const float empty[] = {-INFINITY, NAN, INFINITY};
    l = empty[kind % 3];
    nan_payload = kind % 2 == 0;
  }
  if (threadIdx.x == 0) lse[row] = l;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    const int64_t i = static_cast<int64_t>(row) * dim + d;
    set_number(o, i, value(mine, i), nan_payload || (kind == 3 && d / 2 % 32 == 5), dtype);
  }
}

struct Judgement {
  unsigned long long wrong;
  double worst;  // error over tolerance
};

// Counts elements of out [rows, dim] and lse [rows] (may be null) of rank `owner` that differ from the float64 merge of
// all ranks' inputs by more than one step of the dtype plus 1e-5 of the terms' magnitude. A block per row.
struct Inputs {
  const void* o[kMaxRanks];
  const float* lse[kMaxRanks];
};
__global__ void judge_rows(Inputs in, const void* out, const float* out_lse, int cp, int heads, int heads_per_rank,
                           int dim, Dtype dtype, Base base, int owner, Judgement* verdict) {
  const int row = blockIdx.x;
  const int64_t at = static_cast<int64_t>(row / heads_per_rank) * heads + owner * heads_per_rank + row % heads_per_rank;
  const bool has_head = owner * heads_per_rank + row % heads_per_rank < heads;
  const double ln = base == Base::two ? 0.69314718055994530942 : 1.0;
  double m = -INFINITY, s = 0;
  const auto lse = [&](int rank) {
    const double l = has_head ? in.lse[rank][at] : -INFINITY;
    return l < INFINITY ? l : -INFINITY;
  };
  for (int rank = 0; rank < cp; ++rank) m = fmax(m, lse(rank));
  if (m == -INFINITY) m = 0;
  for (int rank = 0; rank < cp; ++rank) s += exp((lse(rank) - m) * ln);
  const auto report = [&](double error, double tolerance) {
    if (error <= tolerance) return;
    atomicAdd(&verdict->wrong, 1ull);
    verdict->worst = error / tolerance;
  };
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    double expected = 0, magnitude = 0;
    for (int rank = 0; rank < cp; ++rank) {
      const double w = exp((lse(rank) - m) * ln);
      if (!(w > 0)) continue;
      const double term = w / s * number(in.o[rank], at * dim + d, dtype);
      expected += term;
      magnitude += fabs(term);
    }
    const double got = number(out, static_cast<int64_t>(row) * dim + d, dtype);
    const double tolerance = step_of(dtype) * fabs(expected) + 1e-5 * magnitude + 0x1p-24;
    if (isnan(expected))
      report(isnan(got) ? 0 : 1, 0.5);
    else
      report(isnan(got) ? INFINITY : fabs(got - expected), tolerance);
  }
  if (out_lse == nullptr || threadIdx.x != 0) return;
  const double expected = s > 0 ? m + log(s) / ln : -INFINITY;
  if (expected == -INFINITY)
    report(out_lse[row] == -INFINITY ? 0 : 1, 0.5);
  else
    report(isnan(out_lse[row]) ? INFINITY : fabs(out_lse[row] - expected), 1e-5 * (1 + fabs(expected)));
}

__global__ void count_differences(const uint32_t* a, const uint32_t* b, int64_t words,
                                  unsigned long long* differences) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(differences, 1ull);
  }
}

// Occupies its stream for some time.
__global__ void delay(uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}

// Memory traffic in the background, for a bounded time.
__global__ void traffic(uint4* words, int64_t count, uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
      uint4 v = words[i];
      v.x += 1;
      words[i] = v;
    }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace jaxcp::test

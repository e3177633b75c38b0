// Norm and rotation of heads: queries, keys and index queries, as a layer's products leave them (host interface).
//
//     x <- round(x / sqrt(mean(x^2) + eps) (1 + weight)),  sums in fp32; then the leading 2 * pairs features rotated:
//     x_i' = x_i cos_i - x_{i+pairs} sin_i        x_{i+pairs}' = x_{i+pairs} cos_i + x_i sin_i
//
// rounded to bf16 once (main heads), or in steps: cos, sin, every product and every sum (heads of the indexer); as
// jaxcp/qsa/numerics.py and rope.py have it. A head is read and written once: 16 bytes per lane, DIM / 8 lanes per
// head.
//
//   8192 rows, 24 heads of 256: 100 MB read, 100 MB written; 48 us at 4.2 TB/s. XLA takes two kernels and 153 us, since
//   it reads a row's features for their sum and again for their use.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "angles.h"

namespace jaxcp::qsa {

// Heads of one kind in `rows` rows.
struct Heads {
  const void* from;                            // bf16: head h of row r at r * row_stride + h * head_stride
  const void* weight;                          // bf16 [dim]; null: the head is copied as it is
  void* to;                                    // bf16: head h of row r at r * to_stride + h * dim
  int64_t row_stride, head_stride, to_stride;  // in features
  int32_t heads, dim;                          // dim: 64, 128 or 256
  bool in_steps;
};

constexpr int kMostKinds = 4;

struct PrepareParams {
  Heads of[kMostKinds];
  int32_t kinds;
  Angles angles;
  float eps;
  int64_t rows;
};

// What is wrong with `params`, or null.
const char* problem(const PrepareParams& params);

cudaError_t launch_prepare(const PrepareParams& params, cudaStream_t stream);

// Loads every kernel on the current device.
cudaError_t load_prepare();

}  // namespace jaxcp::qsa

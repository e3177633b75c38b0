// FlashInfer's top-k (flashinfer/topk.cuh of an installed flashinfer-python 0.7.4) over rows of scores: a second
// opinion, and the peer in benchmarks. Exact, ascending ids, ties to the smaller id, -1 behind.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxcp::qsa {

struct FlashInferRows {
  float* scores;     // [rows, blocks]; blocks a multiple of 4
  int32_t* visible;  // [rows]
  int32_t* zeros;    // [rows], what is added to ids
  int32_t* ids;      // [rows, k]
  uint32_t rows, blocks, k;
};
constexpr uint32_t kMaxFlashInferK = 2048;

cudaError_t launch_flashinfer_topk(const FlashInferRows& r, cudaStream_t stream);

// Loads the kernels that launches use.
cudaError_t load_flashinfer_topk();

}  // namespace jaxcp::qsa

#include <cstring>
#include <flashinfer/math.cuh>  // topk.cuh uses it and does not say so
#include <flashinfer/topk.cuh>

#include "qsa/select_flashinfer.h"

namespace jaxcp::qsa {
namespace {

namespace fi = flashinfer::sampling;
constexpr auto kRagged = fi::FilteredTopKMode::Ragged;
using NoPages = fi::DirectPageTableKernelPolicy<int32_t>;

// The one variant for float scores in rows of whole 16-byte units, ties to the smaller id. FlashInfer's own dispatcher
// would launch the same, and compile some forty others.
constexpr auto kSelect =
    fi::FilteredTopKUnifiedKernel<float, int32_t, 4, true, kRagged, fi::TopKTieBreak::Small, NoPages>;

template <int kThreads, int kItems>
cudaError_t load_sorter() {
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(
      &found, fi::FinalizeTopKIndicesKernel<true, kRagged, kThreads, kItems, uint8_t, int32_t, NoPages>);
}

}  // namespace

cudaError_t launch_flashinfer_topk(const FlashInferRows& r, cudaStream_t stream) {
  kSelect<<<r.rows, fi::FILTERED_TOPK_BLOCK_THREADS, fi::FILTERED_TOPK_SMEM_DYNAMIC, stream>>>(
      r.scores, r.ids, nullptr, r.zeros, 0, nullptr, r.visible, nullptr, nullptr, r.rows, r.k, r.blocks);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return fi::LaunchFinalizeTopKIndices<true, kRagged, uint8_t, int32_t>(r.ids, nullptr, r.zeros, 0, nullptr, nullptr,
                                                                        r.rows, r.k, r.blocks, stream);
}

cudaError_t load_flashinfer_topk() {
  const cudaError_t errors[] = {
      cudaFuncSetAttribute(kSelect, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(fi::FILTERED_TOPK_SMEM_DYNAMIC)),
      load_sorter<32, 4>(),
      load_sorter<32, 8>(),
      load_sorter<64, 8>(),
      load_sorter<64, 9>(),
      load_sorter<128, 8>(),
      load_sorter<256, 8>(),
  };
  for (const cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxcp::qsa

// Launch of FlashInfer's kernel. Compile with -I flashinfer_shim -I <flashinfer>/data/include.
#include <algorithm>
#include <flashinfer/comm/dcp_lse_reduce.cuh>

#include "flashinfer.h"

namespace jaxcp {
namespace {

namespace dcp = flashinfer::comm::dcp;

constexpr int kRowsDistributed = 16;  // from here on its kernel spreads rows over the grid

template <class T>
const void* choose(bool base_e, bool distributed) {
  if (base_e) {
    return distributed ? reinterpret_cast<const void*>(dcp::FusedKernel<T, true, true>)
                       : reinterpret_cast<const void*>(dcp::FusedKernel<T, true, false>);
  }
  return distributed ? reinterpret_cast<const void*>(dcp::FusedKernel<T, false, true>)
                     : reinterpret_cast<const void*>(dcp::FusedKernel<T, false, false>);
}

const void* choose(Dtype dtype, bool base_e, bool distributed) {
  return dtype == Dtype::bfloat16 ? choose<__nv_bfloat16>(base_e, distributed) : choose<__half>(base_e, distributed);
}

}  // namespace

cudaError_t load_flashinfer() {
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
    for (const bool base_e : {false, true}) {
      for (const bool distributed : {false, true}) {
        cudaFuncAttributes attributes;
        if (cudaError_t e = cudaFuncGetAttributes(&attributes, choose(dtype, base_e, distributed)); e != cudaSuccess)
          return e;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_flashinfer(const FlashInferParams& params, int grid_cap, cudaStream_t stream) {
  const void* kernel = choose(params.dtype, params.base == Base::e, params.rows >= kRowsDistributed);
  const size_t shared = params.cp * sizeof(float);
  int device = 0, multiprocessors = 0, each = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, dcp::kFusedBlockSize, shared);
      e != cudaSuccess)
    return e;
  int blocks = std::min(std::max(params.rows, params.cp), each * multiprocessors);
  if (grid_cap > 0) blocks = std::min(blocks, grid_cap);

  const FlashInferLayout layout{params.cp, params.capacity, params.dim * 2};
  FlashInferParams p = params;
  ncclWindow_t window = reinterpret_cast<ncclWindow_t>(p.workspaces);  // offsets in it start at a workspace
  size_t signals = dcp::kMetadataBytes, data = layout.zero_bytes(), slot_data = layout.slot_data();
  size_t lse = layout.lse_begin(), slot_lse = layout.slot_lse();
  int heads = 1;  // rows are flattened already
  void* arguments[] = {&p.o, &p.lse,    &p.workspace, &window, &signals, &data,   &data,       &slot_data, &lse,
                       &lse, &slot_lse, &p.out,       &p.rank, &p.cp,    &p.rows, &p.capacity, &heads,     &p.dim};
  return cudaLaunchCooperativeKernel(kernel, blocks, dcp::kFusedBlockSize, arguments, shared, stream);
}

cudaError_t reset_flashinfer(uint8_t* workspace, const FlashInferLayout& layout, cudaStream_t stream) {
  return cudaMemsetAsync(workspace, 0, layout.zero_bytes(), stream);
}

}  // namespace jaxcp

// Choice and launch of the exchange kernel's variants.
#include <algorithm>

#include "exchange.cuh"
#include "exchange.h"

namespace jaxcp {
namespace {

using Kernel = void (*)(Plan, ExchangeParams);

Kernel choose(Dtype dtype, int cp, int row_bytes) {
  return device::with_variant(dtype, cp, row_bytes, [](auto variant) -> Kernel {
    return device::exchange_kernel<typename decltype(variant)::type>;
  });
}

}  // namespace

cudaError_t load_exchange() {
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
    for (const int cp : {2, 4, 8, kMaxRanks}) {
      for (const int row_bytes : {512, 1024, 2048}) {
        cudaFuncAttributes attributes;
        const Kernel kernel = choose(dtype, cp, row_bytes);
        if (cudaError_t e = cudaFuncGetAttributes(&attributes, kernel); e != cudaSuccess) return e;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t resident_blocks(const ExchangeParams& params, int* blocks) {
  const Kernel kernel = choose(params.dtype, params.cp, params.layout().row_bytes);
  int device = 0, multiprocessors = 0, each = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess)
    return e;
  if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0); e != cudaSuccess)
    return e;
  *blocks = each * multiprocessors;
  return cudaSuccess;
}

int useful_blocks(const ExchangeParams& params) { return static_cast<int>(Plan::of(params, 0).schedule.items()); }

cudaError_t launch_exchange(const ExchangeParams& params, cudaStream_t stream) {
  int blocks = 0;
  if (cudaError_t e = resident_blocks(params, &blocks); e != cudaSuccess) return e;
  if (params.grid_cap > 0) blocks = std::min(blocks, params.grid_cap);
  blocks = std::min(blocks, useful_blocks(params));
  const Kernel kernel = choose(params.dtype, params.cp, params.layout().row_bytes);
  kernel<<<blocks, kThreads, 0, stream>>>(Plan::of(params, blocks), params);
  return cudaGetLastError();
}

cudaError_t blank_workspace(uint8_t* workspace, const Layout& layout, cudaStream_t stream) {
  if (cudaError_t e = cudaMemsetAsync(workspace, 0xFF, layout.bytes(), stream); e != cudaSuccess) return e;
  return cudaMemsetAsync(workspace, 0, sizeof(Control), stream);
}

}  // namespace jaxcp

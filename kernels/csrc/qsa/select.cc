// Which sizes can be selected from, and by which method: see select.h.
#include "qsa/select.h"

#include <algorithm>

namespace jaxcp::qsa {

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::max(count, 1);
}

const char* problem(const SelectParams& p) {
  if (p.heads < 1 || p.heads > kMaxIndexHeads) return "index heads must be 1 ... 8";
  if (p.dim != 64 && p.dim != 128) return "index_dim must be 64 or 128";
  if (p.k < 1 || p.ratio < 1 || p.blocks < 1 || p.longest < 1) return "k, ratio, blocks and longest must be positive";
  if (p.layers < 1 || p.pages < 1 || p.page_blocks < 1 || p.requests < 1)
    return "the pool and the page table must not be empty";
  if (p.blocks > int64_t{p.request_pages} * p.page_blocks) return "blocks exceed the page table";
  if (p.blocks > INT32_MAX - kStageKeys) return "too many blocks";
  if (p.method == Method::streaming) {
    if (p.k > kMaxStreamedK || p.heads > kMaxStreamedHeads)
      return "streaming selects at most 512 blocks with at most 4 heads";
    if (p.scratch_bytes < kStreamBytes) return "scratch must hold one block's lists";
  } else if (p.method == Method::stored) {
    const int64_t stride = (int64_t{p.blocks} + kStageKeys - 1) / kStageKeys * kStageKeys;
    if (p.scratch_bytes < stride * int64_t{sizeof(float)}) return "scratch must hold one row's scores";
  } else {
    return "method must be 0 or 1";
  }
  return nullptr;
}

cudaError_t launch_select(const SelectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return p.method == Method::streaming ? launch_streaming(p, stream) : launch_stored(p, stream);
}

cudaError_t load_select() {
  for (const auto load : {load_stored, load_top_blocks, load_streaming}) {
    if (const cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxcp::qsa

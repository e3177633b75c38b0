// Which kernel selects from rows of given scores: see select.h.
#include <algorithm>
#include <span>

#include "qsa/select_top.cuh"

namespace jaxcp::qsa {
namespace {

constexpr int kClusterBlocks = 8;                    // blocks of a cluster
constexpr int kShortRow = 4096, kShortPerRow = 512;  // up to here a cluster gains nothing; by rows (H200)
constexpr int32_t kAny = 0x7FFFFFFF;

struct Kernel {
  void (*run)(ScoredRows);
  int blocks, threads;  // blocks of a row
  int32_t longest;      // row
};
using Kernels = std::span<const Kernel>;  // the one for the shortest rows first

template <class Keys, int kThreads>
Kernel of_block(int32_t longest = kAny) {
  return {top_blocks<kThreads, Keys>, 1, kThreads, longest};
}
template <class Keys, int kThreads>
Kernel of_cluster(int32_t longest = kAny) {
  return {cluster_top_blocks<kClusterBlocks, kThreads, Keys>, kClusterBlocks, kThreads, longest};
}
template <int kPerThread>
Kernel block_of_registers() {
  using Keys = InRegisters<512, kPerThread>;
  return of_block<Keys, 512>(Keys::kMost);
}
template <int kPerThread>
Kernel cluster_of_registers() {
  using Keys = InRegisters<512, kPerThread>;
  return of_cluster<Keys, 512>(kClusterBlocks * Keys::kMost);
}

// A few rows have all a processor's threads, whose time is instructions rather than loads: where one block has a row,
// registers do not pay.
const Kernel kFewRows[] = {of_block<InMemory<1024>, 1024>()};
const Kernel kManyRows[] = {block_of_registers<4>(), block_of_registers<16>(), of_block<InMemory<512>, 512>()};
const Kernel kFewLongRows[] = {cluster_of_registers<8>(), cluster_of_registers<16>(), of_cluster<InMemory<512>, 512>()};

const Kernel& kernel_for(int32_t rows, int32_t blocks) {
  const int sms = multiprocessors();
  Kernels kernels = kManyRows;
  if (rows <= 2 * sms) kernels = kFewRows;
  if (rows <= sms / 2 && blocks > std::max(kShortRow, kShortPerRow * rows)) kernels = kFewLongRows;
  return *std::ranges::find_if(kernels, [&](const Kernel& kernel) { return blocks <= kernel.longest; });
}

}  // namespace

cudaError_t launch_top_blocks(const ScoredRows& r, cudaStream_t stream) {
  const Kernel& kernel = kernel_for(r.rows, r.blocks);
  kernel.run<<<r.rows * kernel.blocks, kernel.threads, 0, stream>>>(r);
  return cudaGetLastError();
}

cudaError_t load_top_blocks() {
  for (const Kernels kernels : {Kernels(kFewRows), Kernels(kManyRows), Kernels(kFewLongRows)}) {
    for (const Kernel& kernel : kernels) {
      cudaFuncAttributes found;
      if (const auto error = cudaFuncGetAttributes(&found, kernel.run); error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jaxcp::qsa

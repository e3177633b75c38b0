// Times of the exchange on simulated ranks, a JSON object per line. For regression only: ranks that share one device
// share its memory system and multiprocessors, and no link lies between them.
//   kernel_us   median kernel duration, of the slowest rank
//   cadence_us  a graph of 60 calls divided by 60, of the slowest rank; median of 21 replays
// The result is judged before and after, outside the timed loops.
#include <algorithm>
#include <cstring>

#include "flashinfer_ranks.cuh"
#include "kernel_times.h"

namespace jaxcp::test {
namespace {

constexpr int kCalls = 60;
constexpr int kReplays = 21;

// Enqueues work on all ranks' streams while a delay holds them back, so that the ranks start together.
template <class Enqueue>
void start_together(const Ranks& ranks, Enqueue enqueue) {
  cudaEvent_t gate;
  CHECK(cudaEventCreateWithFlags(&gate, cudaEventDisableTiming));
  cudaStream_t first = ranks.streams[ranks.shape.cp];  // a stream of no rank
  delay<<<1, 1, 0, first>>>(15'000'000);
  CHECK(cudaEventRecord(gate, first));
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    CHECK(cudaStreamWaitEvent(ranks.streams[rank], gate));
    enqueue(rank);
  }
  ranks.wait();
  CHECK(cudaEventDestroy(gate));
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// launch(rank) enqueues one call.
template <class Launch>
double cadence(const Ranks& ranks, Launch launch) {
  const int cp = ranks.shape.cp;
  std::vector<cudaGraphExec_t> graphs(cp);
  std::vector<cudaEvent_t> begin(cp), end(cp);
  for (int rank = 0; rank < cp; ++rank) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(ranks.streams[rank], cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) launch(rank);
    CHECK(cudaStreamEndCapture(ranks.streams[rank], &graph));
    CHECK(cudaGraphInstantiate(&graphs[rank], graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventCreate(&begin[rank]));
    CHECK(cudaEventCreate(&end[rank]));
  }
  std::vector<std::vector<double>> times(cp);
  for (int replay = 0; replay < kReplays; ++replay) {
    start_together(ranks, [&](int rank) {
      CHECK(cudaEventRecord(begin[rank], ranks.streams[rank]));
      CHECK(cudaGraphLaunch(graphs[rank], ranks.streams[rank]));
      CHECK(cudaEventRecord(end[rank], ranks.streams[rank]));
    });
    for (int rank = 0; rank < cp; ++rank) {
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin[rank], end[rank]));
      times[rank].push_back(ms * 1e3 / kCalls);
    }
  }
  double slowest = 0;
  for (int rank = 0; rank < cp; ++rank) {
    slowest = std::max(slowest, median(times[rank]));
    cudaGraphExecDestroy(graphs[rank]);
    cudaEventDestroy(begin[rank]);
    cudaEventDestroy(end[rank]);
  }
  return slowest;
}

template <class Launch>
double kernel_time(const Ranks& ranks, const char* name, Launch launch) {
  KernelTimes times;
  start_together(ranks, [&](int rank) {
    for (int i = 0; i < kCalls; ++i) launch(rank);
  });
  return times.slowest_median(name);
}

void report(const char* kernel, const Ranks& ranks, int tokens, double kernel_us, double cadence_us) {
  std::printf(
      "{\"kernel\": \"%s\", \"cp\": %d, \"tokens\": %d, \"heads_per_rank\": %d, \"dim\": %d, \"kernel_us\": %.2f, "
      "\"cadence_us\": %.2f}\n",
      kernel, ranks.shape.cp, tokens, ranks.shape.heads_per_rank(), ranks.shape.dim, kernel_us, cadence_us);
  std::fflush(stdout);
}

void bench(int cp, int tokens) {
  Ranks ranks({cp, tokens, 16 * cp, 512});
  ranks.with_lse = false;
  ranks.fill(1);
  const auto launch = [&](int rank) { ranks.launch(rank, ranks.params(rank, tokens)); };
  ranks.call(tokens);
  ranks.judge(tokens, "fused, before");
  const double ours = kernel_time(ranks, "exchange_kernel", launch);
  report("fused", ranks, tokens, ours, cadence(ranks, launch));
  ranks.judge(tokens, "fused, after");

  FlashInferRanks theirs(ranks);
  theirs.take_inputs();
  const auto launch_theirs = [&](int rank) { theirs.launch(rank, tokens); };
  const double others = kernel_time(ranks, "FusedKernel", launch_theirs);
  report("flashinfer", ranks, tokens, others, cadence(ranks, launch_theirs));
  ranks.judge(tokens, "flashinfer, after");
}

__global__ void empty() {}

}  // namespace
}  // namespace jaxcp::test

int main() {
  using namespace jaxcp;
  using namespace jaxcp::test;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  try {
    CHECK(load_exchange());
    CHECK(load_flashinfer());
    {
      Ranks ranks({2, 1, 2, 512});
      const auto launch = [&](int rank) { empty<<<1, 32, 0, ranks.streams[rank]>>>(); };
      const double alone = kernel_time(ranks, "empty", launch);
      report("empty", ranks, 0, alone, cadence(ranks, launch));
    }
    for (const int cp : {2, 8}) {
      for (const int tokens : {1, 2, 4, 8, 16, 32, 64, 128, 512}) bench(cp, tokens);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchange_bench: %s\n", error.what());
    return 1;
  }
}

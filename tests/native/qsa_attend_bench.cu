// Times of sparse attention on one GPU, a line of JSON per measurement. Usage: qsa_attend_bench
// [prefill|decode|short|profile]
#include <algorithm>
#include <cstring>

#include "qsa_attend_data.cuh"

namespace jaxcp::qsa::test {
namespace {

// Median time of a call in us: `repeats` in a graph, `launches` launches of it.
template <class Call>
double microseconds(Call call, int repeats, int launches = 7) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < repeats; ++i) call(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<double> times;
  for (int i = 0; i <= launches; ++i) {
    float ms = 0;
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0) times.push_back(1e3 * ms / repeats);
  }
  CHECK(cudaGraphExecDestroy(executable));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

Slice whole(const AttendParams& p) {
  Slice slice{};
  slice.count = p.rows, slice.tiles = static_cast<int32_t>((p.rows + p.tile_rows - 1) / p.tile_rows),
  slice.lists = p.scratch;
  return slice;
}

// Rows at the end of one request: the union kernel, its lists alone, the portable kernel, and rows alone.
void prefill(int rows, int keys, Choice choice, bool peers) {
  Problem problem({{{0, keys - rows, rows}}, 24, 2, 256, 512, 4, 64, choice, 21, 1, 0});
  const AttendParams& p = problem.p;
  const int tile_rows = p.tile_rows, repeats = rows > 10000 ? 2 : 5;
  const double all = microseconds([&](cudaStream_t s) { CHECK(launch_attend(p, s)); }, repeats);
  problem.judge_results("bench", std::max(1, rows / 64));
  const auto [complete, tails] = problem.listed();
  const double lists = microseconds([&](cudaStream_t s) { CHECK(launch_lists(p, whole(p), s)); }, repeats);
  const double tokens = complete * 4.0 + tails * 4.0, per_row = tokens / rows;
  double portable = 0, alone = 0;
  if (peers) {
    portable = microseconds([&](cudaStream_t s) { CHECK(launch_portable(p, whole(p), s)); }, repeats);
    problem.configure(1, 1, rows);
    alone = microseconds([&](cudaStream_t s) { CHECK(launch_attend(p, s)); }, repeats);
    problem.judge_results("bench, rows alone", std::max(1, rows / 64));
  }
  std::printf(
      "{\"rows\": %d, \"keys\": %d, \"choice\": \"%s\", \"union_tokens_per_row\": %.0f, \"ms\": %.3f, \"lists_ms\": "
      "%.4f, "
      "\"gathered_tb_s\": %.2f, \"mma_tflop_s\": %.0f, \"portable_ms\": %.3f, \"rows_alone_ms\": %.3f, \"tile_rows\": "
      "%d}\n",
      rows, keys, name(choice), per_row, all * 1e-3, lists * 1e-3, tokens * 2048 / all * 1e-6,
      tokens * 131072 / all * 1e-6, portable * 1e-3, alone * 1e-3, tile_rows);
  std::fflush(stdout);
}

// A chunk of few rows, its lists cut into parts.
void chunk(int rows, int keys, int splits) {
  Problem problem({{{0, keys - rows, rows}}, 24, 2, 256, 512, 4, 64, Choice::shared, 21, 1, 0});
  problem.configure(problem.p.tile_rows, splits, rows);
  const double us = microseconds([&](cudaStream_t s) { CHECK(launch_attend(problem.p, s)); }, 20);
  problem.judge_results("chunk");
  std::printf("{\"rows\": %d, \"keys\": %d, \"splits\": %d, \"us\": %.1f}\n", rows, keys, splits, us);
}

// One row of each of many requests, lists cut into some number of parts; several layers in turn, so that L2 is cold.
void decode(int requests, int keys, int splits) {
  Setup setup{{}, 24, 2, 256, 512, 4, 64, Choice::random, 31, 1, 0};
  for (int i = 0; i < requests; ++i) setup.runs.push_back({i, keys - 1 - i, 1});
  const int copies = std::max(1, 32 / requests);  // 268 MB per 131072 tokens
  std::vector<Problem> problems;
  for (int i = 0; i < std::min(copies, 4); ++i) {
    setup.seed = 31 + i;
    problems.emplace_back(setup);
    problems.back().configure(1, splits, requests);
  }
  size_t turn = 0;
  const double us =
      microseconds([&](cudaStream_t s) { CHECK(launch_attend(problems[turn++ % problems.size()].p, s)); }, 24);
  for (const Problem& problem : problems) problem.judge_results("decode");
  const double parts = microseconds(
      [&](cudaStream_t s) {
        const Problem& problem = problems[turn++ % problems.size()];
        Slice slice = whole(problem.p);
        slice.part_o = reinterpret_cast<float*>(problem.p.scratch);
        slice.part_lse = slice.part_o + int64_t{splits} * problem.p.rows * problem.p.heads * problem.p.dim;
        CHECK(launch_rows(problem.p, slice, s));
      },
      24);
  std::printf(
      "{\"requests\": %d, \"keys\": %d, \"splits\": %d, \"us\": %.2f, \"without_merge_us\": %.2f, \"read_tb_s\": "
      "%.2f}\n",
      requests, keys, splits, us, parts, requests * 2050.0 * 2048 / us * 1e-6);
  std::fflush(stdout);
}

}  // namespace
}  // namespace jaxcp::qsa::test

int main(int argc, char** argv) {
  using namespace jaxcp::qsa::test;
  const auto wanted = [&](const char* name) { return argc < 2 || std::strcmp(argv[1], name) == 0; };
  try {
    CHECK(jaxcp::qsa::load_attend());
    if (wanted("prefill")) {
      for (const Choice choice : {Choice::shared, Choice::drift, Choice::loose, Choice::random}) {
        prefill(8192, 32768, choice, true);
        prefill(2048, 8192, choice, true);
      }
      prefill(8192, 8192, Choice::shared, true);
      prefill(8192, 8192, Choice::random, true);
      prefill(32768, 131072, Choice::shared, false);
      prefill(32768, 131072, Choice::random, true);
    }
    if (argc > 1 && std::strcmp(argv[1], "profile") == 0) prefill(8192, 32768, Choice::drift, false);
    if (wanted("short")) {
      for (const int rows : {16, 64, 128, 256, 512}) {
        for (const int splits : {1, 2, 3, 5, 10, 20}) chunk(rows, 32768, splits);
      }
      for (const int keys : {2048, 4096}) prefill(keys, keys, Choice::random, true);
    }
    if (wanted("decode")) {
      for (const int splits : {9, 17, 33, 64}) decode(1, 131072, splits);
      for (const int splits : {8, 11, 17, 33}) decode(4, 131072, splits);
      for (const int splits : {2, 3, 4, 8}) decode(16, 131072, splits);
      for (const int splits : {1, 2, 3, 4}) decode(32, 32768, splits);
      for (const int splits : {1, 2, 4}) decode(64, 32768, splits);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

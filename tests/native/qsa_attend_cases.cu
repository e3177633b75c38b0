// Cases of sparse attention on one GPU. Usage: qsa_attend_cases NAME; without a name: prints the names.
#include <cstring>
#include <functional>

#include "qsa_attend_data.cuh"

namespace jaxcp::qsa::test {
namespace {

enum class Kernel { chosen, portable };

// One call, like launch_attend; or with the portable kernel where the GPU's own would be taken.
void call(const Problem& problem, Kernel kernel = Kernel::chosen) {
  const AttendParams& p = problem.p;
  if (kernel == Kernel::chosen) {
    CHECK(launch_attend(p, nullptr));
    return;
  }
  Slice slice{};
  slice.count = p.rows, slice.tiles = static_cast<int32_t>((p.rows + p.tile_rows - 1) / p.tile_rows);
  slice.lists = p.scratch;
  if (p.slice < p.rows || p.splits > 1)
    throw std::runtime_error("the portable kernel is called for whole problems here");
  CHECK(launch_lists(p, slice, nullptr));
  CHECK(launch_portable(p, slice, nullptr));
}

void run(Problem& problem, const std::string& what, Kernel kernel = Kernel::chosen) {
  problem.poison();
  call(problem, kernel);
  CHECK(cudaDeviceSynchronize());
  problem.judge_results(what + (kernel == Kernel::portable ? ", portable" : ""));
}

std::string describe(const Problem& problem) {
  const AttendParams& p = problem.p;
  const auto n = [](auto x) { return std::to_string(x); };
  return std::string(name(problem.setup.choice)) + ", " + n(p.rows) + " rows, heads " + n(p.heads) + "/" +
         n(p.kv_heads) + ", dim " + n(p.dim) + ", width " + n(p.width) + ", ratio " + n(p.ratio) + ", tile_rows " +
         n(p.tile_rows) + ", splits " + n(p.splits);
}

// All ways to compute one problem, judged row by row.
void every_way(Setup setup) {
  Problem problem(setup);
  const int most = problem.p.tile_rows;
  run(problem, describe(problem));
  if (problem.p.has_lists()) run(problem, describe(problem), Kernel::portable);
  problem.configure(most, 3, problem.p.rows);
  run(problem, describe(problem));
  for (const int splits : {1, 5, 64}) {
    problem.configure(1, splits, problem.p.rows);
    run(problem, describe(problem));
  }
}

const std::vector<Run> kRagged = {{0, 300, 21},     {1, 0, 7, 2}, {2, 1021, 9}, {0, 321, 3}, {3, 2, 1, 1},
                                  {4, 4095, 13, 6}, {5, 0, 1},    {6, 3, 1},    {7, 64, 2},  {5, 1, 2, 3}};

// Group sizes, dims, ratios and page sizes on ragged batches with padding, rows at positions 0 ... 3, tails of all
// lengths.
void shapes() {
  const int heads[][2] = {{3, 3}, {8, 1}, {24, 2}, {32, 2}, {4, 2}, {64, 1}, {40, 2}};
  uint64_t seed = 10;
  for (const auto& [h, kv] : heads) {
    for (const int dim : {64, 128, 256}) {
      every_way({kRagged, h, kv, dim, 24, 4, 16, Choice::loose, ++seed});
    }
  }
  for (const int ratio : {1, 2, 8, 128}) every_way({kRagged, 24, 2, 256, 20, ratio, 128, Choice::loose, ++seed});
  every_way({kRagged, 24, 2, 256, 512, 4, 64, Choice::random, ++seed});
  every_way({kRagged, 24, 2, 128, 3, 4, 4, Choice::random, ++seed});
}

// What neighbouring rows share, from everything to nothing.
void choices() {
  for (const Choice choice :
       {Choice::random, Choice::same, Choice::shared, Choice::drift, Choice::loose, Choice::half, Choice::disjoint}) {
    every_way({{{0, 7001, 70}, {1, 2045, 43, 2}}, 24, 2, 256, 512, 4, 64, choice, 77});
  }
}

// Contexts that need several windows of the lists, up to 131072 tokens.
void long_contexts() {
  for (const int end : {32768, 65536, 131072}) {
    for (const Choice choice : {Choice::random, Choice::shared}) {
      every_way({{{0, end - 18, 18}}, 24, 2, 256, 512, 4, 64, choice, 5});
    }
  }
}

// Rows without anything to attend to: only padding; padding in front.
void nothing() {
  every_way({{{0, 0, 0, 9}}, 24, 2, 256, 512, 4, 64, Choice::random, 6});
  every_way({{{0, 0, 0, 6}, {0, 50, 3}}, 24, 2, 256, 512, 4, 64, Choice::random, 6});
}

// Lists of some rows at a time give the same bits as all at once; a repeated call its own.
void same_bits() {
  Problem problem({{{0, 5000, 333}, {1, 100, 50, 4}}, 24, 2, 256, 512, 4, 64, Choice::drift, 8});
  run(problem, describe(problem));
  const int64_t words = problem.p.rows * problem.p.heads * problem.p.dim / 2;
  Buffer<uint32_t> first(words);
  CHECK(cudaMemcpy(first.get(), problem.p.o, words * 4, cudaMemcpyDefault));
  for (const int64_t slice : {problem.p.rows, int64_t{100}, int64_t{5}}) {
    problem.configure(5, 1, slice);
    run(problem, "slices of " + std::to_string(slice));
    const Buffer<unsigned long long> differences(std::vector<unsigned long long>(1));
    count_differences<<<256, 256>>>(first.get(), static_cast<const uint32_t*>(problem.p.o), words, differences.get());
    if (differences.host()[0] != 0) throw std::runtime_error("other bits from slices of " + std::to_string(slice));
  }
}

// A captured call, replayed on new data.
void graphs() {
  Problem problem({{{0, 3000, 200}}, 24, 2, 256, 512, 4, 64, Choice::shared, 9});
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamCreate(&stream));
  for (const auto& [tile_rows, splits] : {std::pair{5, 1}, {5, 2}, {1, 1}, {1, 4}}) {
    problem.configure(tile_rows, splits, problem.p.rows);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(launch_attend(problem.p, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int replay = 0; replay < 3; ++replay) {
      problem.poison();
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaGraphLaunch(executable, stream));
      CHECK(cudaStreamSynchronize(stream));
      problem.judge_results("replay of " + describe(problem));
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
  }
  CHECK(cudaStreamDestroy(stream));
}

// Small enough for a sanitizer.
void small() { every_way({{{0, 100, 11, 1}, {1, 0, 3}}, 24, 2, 256, 20, 4, 16, Choice::loose, 3}); }

const std::pair<const char*, std::function<void()>> kCases[] = {
    {"shapes", shapes},   {"choices", choices},     {"long_contexts", long_contexts},
    {"nothing", nothing}, {"same_bits", same_bits}, {"graphs", graphs},
    {"small", small}};

}  // namespace
}  // namespace jaxcp::qsa::test

int main(int argc, char** argv) {
  using namespace jaxcp::qsa::test;
  if (argc < 2) {
    for (const auto& [name, run] : kCases) std::printf("%s\n", name);
    return 0;
  }
  try {
    CHECK(jaxcp::qsa::load_attend());
    for (const auto& [name, run] : kCases) {
      if (std::strcmp(name, argv[1]) != 0) continue;
      run();
      CHECK(cudaDeviceSynchronize());
      std::printf("%s: ok\n", name);
      return 0;
    }
    std::fprintf(stderr, "no case %s\n", argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
  }
  return 1;
}

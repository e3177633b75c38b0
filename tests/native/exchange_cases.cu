// Cases of the fused exchange on simulated ranks. Usage: exchange_cases NAME [COUNT]; without a name: prints the names.
#include "failure_cases.cuh"
#include "soak_cases.cuh"

namespace jaxcp::test {
namespace {

// Results on every rank count, width, dtype and base, with rows that are empty, NaN, infinite or without a head.
// `first` > 0: the first shapes only.
void table(int first) {
  const Shape shapes[] = {
      {2, 3, 32, 512}, {4, 3, 64, 512},  {8, 3, 128, 512},  // the upstream shapes
      {2, 7, 3, 8},    {2, 5, 4, 16},    {3, 4, 6, 24},    {4, 9, 8, 64},    {4, 5, 10, 128},  {5, 3, 16, 192},
      {7, 4, 9, 256},  {8, 3, 9, 264},   {8, 2, 20, 576},  {6, 2, 12, 1024}, {8, 1, 3, 512},   {2, 1, 1, 128},
      {9, 3, 18, 128}, {16, 2, 40, 512}, {33, 2, 40, 64},  {64, 2, 64, 576}, {2, 40, 32, 512}, {8, 70, 64, 128},
  };
  uint64_t seed = 1;
  int done = 0;
  for (Shape shape : shapes) {
    if (first > 0 && done++ == first) return;
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16, Dtype::float32}) {
      for (const Base base : {Base::two, Base::e}) {
        shape.dtype = dtype, shape.base = base;
        Ranks ranks(shape);
        for (const int tokens : {shape.tokens, 1, shape.tokens}) {
          ranks.fill(++seed, Fill::special);
          ranks.poison();
          ranks.call(tokens);
          ranks.judge(tokens, describe(shape, tokens));
        }
        ranks.with_lse = false;
        ranks.call(shape.tokens);
        ranks.judge(shape.tokens, describe(shape, shape.tokens) + ", no lse");
      }
    }
  }
}

// One workspace, calls of varying size, each with new data.
void varying_rows(int) {
  Ranks ranks({4, 32, 16, 128});
  uint64_t seed = 100;
  for (const int tokens : {7, 1, 32, 3, 1, 32, 2}) {
    ranks.fill(++seed, Fill::special);
    ranks.poison();
    ranks.call(tokens);
    ranks.judge(tokens, "tokens " + std::to_string(tokens));
  }
}

// A strided input gives the bits of a contiguous one, and a repeated call its own.
void same_bits(int) {
  for (const Shape shape : {Shape{8, 8, 128, 512}, Shape{8, 3, 16, 128}, Shape{4, 1, 16, 64}}) {
    Ranks ranks(shape);
    ranks.fill(7, Fill::special);
    ranks.call(shape.tokens);
    ranks.judge(shape.tokens, describe(shape, shape.tokens));
    const auto first = ranks.copy_of_outputs();
    ranks.poison();
    ranks.call(shape.tokens);
    ranks.compare(shape.tokens, first);
    expect(ranks.differences() == 0, "the same bits from a repeated call");

    // Heads outermost, rows padded by 8 elements; LSEs token-fastest.
    const int64_t head = int64_t{shape.tokens} * (shape.dim + 8), token = shape.dim + 8;
    std::vector<Buffer<uint16_t>> o;
    std::vector<Buffer<float>> lse;
    std::vector<ExchangeParams> all;
    for (int rank = 0; rank < shape.cp; ++rank) {
      o.emplace_back(head * shape.heads);
      lse.emplace_back(static_cast<size_t>(shape.heads) * shape.tokens);
      for (int t = 0; t < shape.tokens; ++t) {
        const int64_t from = int64_t{t} * shape.heads;
        CHECK(cudaMemcpy2D(o[rank].get() + t * token, head * 2, ranks.o[rank].get() + from * shape.dim, shape.dim * 2,
                           shape.dim * 2, shape.heads, cudaMemcpyDefault));
        CHECK(cudaMemcpy2D(lse[rank].get() + t, shape.tokens * 4, ranks.lse[rank].get() + from, 4, 4, shape.heads,
                           cudaMemcpyDefault));
      }
      ExchangeParams p = ranks.params(rank, shape.tokens);
      p.o = o[rank].get(), p.o_token_stride = token, p.o_head_stride = head;
      p.lse = lse[rank].get(), p.lse_token_stride = 1, p.lse_head_stride = shape.tokens;
      all.push_back(p);
    }
    ranks.poison();
    ranks.call(all);
    ranks.compare(shape.tokens, first);
    expect(ranks.differences() == 0, "the same bits from a strided input");
  }
}

// The call number wraps, and a number comes again with other data.
void call_numbers(int) {
  Ranks ranks(kUsual);
  ranks.set_call_number(0xFFFFFFFDu);
  uint64_t seed = 200;
  for (const int tokens : {8, 1, 5, 8, 2, 8}) {
    ranks.fill(++seed, Fill::special);
    ranks.poison();
    ranks.call(tokens);
    ranks.judge(tokens, "around the wrap");
  }
  for (int rank = 0; rank < kUsual.cp; ++rank)
    expect(ranks.call_number(rank) == 3, "call number 3 after six calls from 2^32 - 3");
  for (int repeat = 0; repeat < 6; ++repeat) {
    ranks.set_call_number(3);
    ranks.fill(++seed);
    ranks.poison();
    ranks.call(8);
    ranks.judge(8, "a repeated call number");
  }
}

// Replays of a graph of 16 calls of changing size, new data each time, eager calls between them.
void graphs(int replays) {
  constexpr int kCalls = 16;
  Ranks ranks({4, 4, 32, 512});
  ranks.mode = Mode::streams;
  std::vector<std::vector<Buffer<uint16_t>>> outputs(kCalls);
  std::vector<cudaGraphExec_t> graphs(ranks.shape.cp);
  for (auto& call : outputs) call = ranks.copy_of_outputs();
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(ranks.streams[rank], cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) {
      ExchangeParams p = ranks.params(rank, 1 + i % 4);
      p.out = outputs[i][rank].get();
      ranks.launch(rank, p);
    }
    CHECK(cudaStreamEndCapture(ranks.streams[rank], &graph));
    CHECK(cudaGraphInstantiate(&graphs[rank], graph, 0));
    CHECK(cudaGraphDestroy(graph));
  }
  for (int replay = 0; replay < replays; ++replay) {
    ranks.fill(300 + replay, Fill::special);
    for (int rank = 0; rank < ranks.shape.cp; ++rank) CHECK(cudaGraphLaunch(graphs[rank], ranks.streams[rank]));
    if (replay % 3 == 0) {
      ranks.call(3);
      ranks.judge(3, "an eager call after a replay");
    }
    for (int i = 0; i < kCalls; ++i)
      ranks.judge(1 + i % 4, "call " + std::to_string(i) + " of replay " + std::to_string(replay), outputs[i]);
  }
  for (cudaGraphExec_t graph : graphs) CHECK(cudaGraphExecDestroy(graph));
}

struct Case {
  const char* name;
  void (*run)(int);
  int count;  // calls or replays unless told otherwise
};
const Case kCases[] = {
    {"table", table, 0},         {"varying_rows", varying_rows, 0},
    {"same_bits", same_bits, 0}, {"call_numbers", call_numbers, 0},
    {"graphs", graphs, 50},      {"skew", skew, 10'000},
    {"tearing", tearing, 300},   {"alternating", alternating, 10'000},
    {"absent", absent, 0},       {"late", late, 0},
    {"refused", refused, 0},     {"soak", soak, 5'000},
};

}  // namespace
}  // namespace jaxcp::test

int main(int argc, char** argv) {
  using namespace jaxcp::test;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // loading a kernel while another waits for its peer is a deadlock
  for (const Case& c : kCases) {
    if (argc < 2) {
      std::printf("%s\n", c.name);
    } else if (std::string(argv[1]) == c.name) {
      try {
        CHECK(jaxcp::load_exchange());
        const double took = seconds([&] { c.run(argc > 2 ? std::atoi(argv[2]) : c.count); });
        std::printf("%s: ok, %.2f s\n", c.name, took);
        return 0;
      } catch (const std::exception& error) {
        std::printf("%s: FAILED: %s\n", c.name, error.what());
        return 1;
      }
    }
  }
  if (argc < 2) return 0;
  std::printf("no case is called %s\n", argv[1]);
  return 2;
}

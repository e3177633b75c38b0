// Cases of the fused exchange on simulated ranks. Usage: exchange_cases NAME [COUNT]; without a name: prints the names.
#include <chrono>
#include <functional>
#include <memory>
#include <random>

#include "ranks.cuh"

namespace jaxcp::test {
namespace {

using Random = std::mt19937;
int between(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

const Shape kUsual{8, 8, 64, 512};  // 8 ranks, 8 heads each

std::string describe(const Shape& s, int tokens) {
  return "cp " + std::to_string(s.cp) + ", tokens " + std::to_string(tokens) + ", heads " + std::to_string(s.heads) + ", dim " +
         std::to_string(s.dim) + (s.dtype == Dtype::bfloat16 ? ", bf16" : ", f16") + (s.base == Base::two ? ", base 2" : ", base e");
}

// Results on every rank count, width, dtype and base, with rows that are empty, NaN, infinite or without a head. `first` > 0:
// the first shapes only.
void table(int first) {
  const Shape shapes[] = {
      {2, 3, 32, 512}, {4, 3, 64, 512}, {8, 3, 128, 512},  // the upstream shapes
      {2, 7, 3, 8},    {2, 5, 4, 16},   {3, 4, 6, 24},    {4, 9, 8, 64},    {4, 5, 10, 128},
      {5, 3, 16, 192}, {7, 4, 9, 256},  {8, 3, 9, 264},   {8, 2, 20, 576},  {6, 2, 12, 1024},
      {8, 1, 3, 512},  {2, 1, 1, 128},  {9, 3, 18, 128},  {16, 2, 40, 512}, {33, 2, 40, 64}, {64, 2, 64, 576},
      {2, 40, 32, 512}, {8, 70, 64, 128},
  };
  uint64_t seed = 1;
  int done = 0;
  for (Shape shape : shapes) {
    if (first > 0 && done++ == first) return;
    for (const Dtype dtype : {Dtype::bfloat16, Dtype::float16}) {
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
        CHECK(cudaMemcpy2D(o[rank].get() + t * token, head * 2, ranks.o[rank].get() + from * shape.dim, shape.dim * 2, shape.dim * 2, shape.heads, cudaMemcpyDefault));
        CHECK(cudaMemcpy2D(lse[rank].get() + t, shape.tokens * 4, ranks.lse[rank].get() + from, 4, 4, shape.heads, cudaMemcpyDefault));
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
  for (int rank = 0; rank < kUsual.cp; ++rank) expect(ranks.call_number(rank) == 3, "call number 3 after six calls from 2^32 - 3");
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
    for (int i = 0; i < kCalls; ++i) ranks.judge(1 + i % 4, "call " + std::to_string(i) + " of replay " + std::to_string(replay), outputs[i]);
  }
  for (cudaGraphExec_t graph : graphs) CHECK(cudaGraphExecDestroy(graph));
}

// Many calls on rotating data; outputs are judged once per data set and compared with that bit by bit ever after.
class Soak {
 public:
  static constexpr int kSets = 4;
  explicit Soak(const Shape& shape, Fill fill = Fill::special) {
    for (int set = 0; set < kSets; ++set) {
      sets_.push_back(std::make_unique<Ranks>(shape));
      sets_[set]->fill(400 + set, fill);
      sets_[set]->call(shape.tokens);
      sets_[set]->judge(shape.tokens, describe(shape, shape.tokens));
      expected_.push_back(sets_[set]->copy_of_outputs());
    }
    sets_[0]->wait();
  }
  // Call number n, of `tokens`, on the workspaces of set 0 and the data of set n mod kSets.
  void call(int n, int tokens) {
    Ranks& data = *sets_[n % kSets];
    std::vector<ExchangeParams> all;
    for (int rank = 0; rank < data.shape.cp; ++rank) {
      all.push_back(data.params(rank, tokens, *sets_[0]));
    }
    sets_[0]->call(all);
    data.compare(tokens, expected_[n % kSets]);
  }
  void finish(const std::string& what) {
    unsigned long long wrong = 0;
    for (auto& set : sets_) wrong += set->differences();
    expect(wrong == 0, what + ": " + std::to_string(wrong) + " wrong words");
    for (int rank = 0; rank < sets_[0]->shape.cp; ++rank) expect(!sets_[0]->expiry(rank).expired, what + ": no expired wait");
  }
  Ranks& ranks() { return *sets_[0]; }

 private:
  std::vector<std::unique_ptr<Ranks>> sets_;
  std::vector<std::vector<Buffer<uint16_t>>> expected_;
};

// One rank at a time is late by up to a millisecond. With 9 heads on 8 ranks, ranks 5 to 7 keep no head at all.
void skew(int calls) {
  for (const Shape shape : {Shape{8, 4, 64, 512}, Shape{8, 4, 9, 512}}) {
    Soak soak(shape);
    Random random(1);
    for (int n = 0; n < calls / 2; ++n) {
      const int rank = between(random, 0, shape.cp - 1), ns = 1000 << between(random, 0, 10);
      delay<<<1, 1, 0, soak.ranks().streams[rank]>>>(n % 50 == 0 ? 1'000'000 : ns / 8);
      soak.call(n, between(random, 1, shape.tokens));
    }
    soak.finish("skewed ranks");
  }
}

// Payload words equal to kBlank, and 10^7 lines of 128 bytes and more under background traffic.
void tearing(int calls) {
  const Shape shape{4, 64, 64, 512};
  Soak soak(shape);
  Buffer<uint4> background(size_t{1} << 26);
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int n = 0; n < calls; ++n) {
    if (n % 100 == 0) traffic<<<32, 256, 0, stream>>>(background.get(), background.bytes() / sizeof(uint4), 10'000'000);
    soak.call(n, shape.tokens);
  }
  soak.finish("under background traffic");
  const double lines = double(calls) * shape.cp * (shape.cp - 1) * shape.tokens * shape.heads_per_rank() * shape.dim * 2 / 128;
  std::printf("%.2g lines; ", lines);
}

// Random sizes, many calls.
void soak(int calls) {
  Soak soak({8, 16, 128, 512});
  Random random(2);
  for (int n = 0; n < calls; ++n) soak.call(n, between(random, 1, between(random, 0, 7) == 0 ? 16 : 3));
  soak.finish("random sizes");
}

// Two exchanges of different shapes take turns on the same streams.
void alternating(int calls) {
  Soak one({8, 4, 64, 512}), other({8, 6, 24, 128, Dtype::float16, Base::e});
  for (int n = 0; n < calls / 2; ++n) {
    one.call(n, 1 + n % 4);
    other.call(n, 1 + n % 6);
  }
  one.finish("first exchange");
  other.finish("second exchange");
}

bool all_nan(const Ranks& ranks, int rank, int tokens) {
  std::vector<uint16_t> out(static_cast<size_t>(tokens) * ranks.shape.heads_per_rank() * ranks.shape.dim);
  CHECK(cudaMemcpy(out.data(), ranks.out[rank].get(), out.size() * 2, cudaMemcpyDeviceToHost));
  for (const uint16_t bits : out) {
    if ((bits & 0x7F80) != 0x7F80 || (bits & 0x7F) == 0) return false;
  }
  return true;
}

double seconds(const std::function<void()>& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A rank that never comes: the others report it, return NaN, and fail fast until a reset.
void absent(int) {
  Ranks ranks(kUsual);
  ranks.mode = Mode::streams;
  ranks.timeout_ns = 100'000'000;
  ranks.fill(500);
  ranks.call(8);
  ranks.judge(8, "before the loss");
  constexpr int kLost = 5;
  const auto call_others = [&] {
    for (int rank = 0; rank < ranks.shape.cp; ++rank) {
      if (rank != kLost) ranks.launch(rank, ranks.params(rank, 8));
    }
    ranks.wait();
  };
  ranks.poison();
  const double first = seconds(call_others);
  expect(first > 0.09 && first < 1, "the wait to end after about its 0.1 s, took " + std::to_string(first));
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    if (rank == kLost) continue;
    const Expiry expiry = ranks.expiry(rank);
    expect(expiry.expired && expiry.peer == kLost && expiry.call == 1 && expiry.row < 64, "a report of rank 5 at call 1");
    expect(all_nan(ranks, rank, 8), "NaN in the output of a rank that waited in vain");
  }
  ranks.poison();
  const double second = seconds(call_others);
  expect(second < 0.05, "a dead workspace to fail fast, took " + std::to_string(second));
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    if (rank != kLost) expect(all_nan(ranks, rank, 8) && ranks.expiry(rank).call == 1, "NaN and the first report from a dead workspace");
  }
  ranks.blank();
  for (int repeat = 0; repeat < 4; ++repeat) {
    ranks.fill(501 + repeat);
    ranks.poison();
    ranks.call(8);
    ranks.judge(8, "after the reset");
  }
}

// A rank that comes late, but in time, changes nothing; one that comes too late finds what was sent to it.
void late(int) {
  Ranks ranks(kUsual);
  ranks.mode = Mode::streams;
  ranks.fill(600);
  ranks.poison();
  delay<<<1, 1, 0, ranks.streams[2]>>>(300'000'000);
  ranks.call(8);
  ranks.judge(8, "a rank 0.3 s late");

  ranks.timeout_ns = 50'000'000;
  ranks.poison();
  delay<<<1, 1, 0, ranks.streams[2]>>>(300'000'000);
  ranks.call(8);
  ranks.wait();
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    expect(ranks.expiry(rank).expired == (rank != 2), "all but the late rank to have given up");
    expect(all_nan(ranks, rank, 8) == (rank != 2), "NaN from all but the late rank");
  }
  ranks.call(8);
  ranks.wait();
  const Expiry expiry = ranks.expiry(2);
  expect(expiry.expired && expiry.call == 2, "the late rank to time out in the call after");
}

// Calls that problem() must refuse.
void refused(int) {
  Ranks ranks(kUsual);
  const auto refuses = [&](auto change, const std::string& what) {
    ExchangeParams p = ranks.params(0, 8);
    change(p);
    expect(problem(p) != nullptr && std::string(problem(p)).find(what) != std::string::npos, "a complaint about " + what);
  };
  refuses([](ExchangeParams& p) { p.cp = 65; }, "cp");
  refuses([](ExchangeParams& p) { p.dim = 12; }, "dim");
  refuses([](ExchangeParams& p) { p.tokens = 9; }, "more rows");
  refuses([](ExchangeParams& p) { p.tokens = 0; }, "tokens");
  refuses([](ExchangeParams& p) { p.heads_per_rank = 7; }, "heads_per_rank");
  refuses([](ExchangeParams& p) { p.o_head_stride = 516; }, "strides");
  refuses([](ExchangeParams& p) { p.o = static_cast<const char*>(p.o) + 8; }, "aligned");
  refuses([](ExchangeParams& p) { p.timeout_ns = 0; }, "time-out");
  expect(problem(ranks.params(0, 8)) == nullptr, "no complaint about a good call");
}

struct Case {
  const char* name;
  void (*run)(int);
  int count;  // calls or replays unless told otherwise
};
const Case kCases[] = {
    {"table", table, 0},          {"varying_rows", varying_rows, 0}, {"same_bits", same_bits, 0}, {"call_numbers", call_numbers, 0},
    {"graphs", graphs, 50},       {"skew", skew, 10'000},            {"tearing", tearing, 300},   {"alternating", alternating, 10'000},
    {"absent", absent, 0},        {"late", late, 0},                 {"refused", refused, 0},     {"soak", soak, 5'000},
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

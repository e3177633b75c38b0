// Ranks that do not come or come late, and calls that are refused.
#pragma once

#include <vector>

#include "ranks.cuh"

namespace jaxcp::test {

inline bool all_nan(const Ranks& ranks, int rank, int tokens) {
  std::vector<uint16_t> out(static_cast<size_t>(tokens) * ranks.shape.heads_per_rank() * ranks.shape.dim);
  CHECK(cudaMemcpy(out.data(), ranks.out[rank].get(), out.size() * 2, cudaMemcpyDeviceToHost));
  for (const uint16_t bits : out) {
    if ((bits & 0x7F80) != 0x7F80 || (bits & 0x7F) == 0) return false;
  }
  return true;
}

// A rank that never comes: the others report it, return NaN, and fail fast until a reset.
inline void absent(int) {
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
    expect(expiry.expired && expiry.peer == kLost && expiry.call == 1 && expiry.row < 64,
           "a report of rank 5 at call 1");
    expect(all_nan(ranks, rank, 8), "NaN in the output of a rank that waited in vain");
  }
  ranks.poison();
  const double second = seconds(call_others);
  expect(second < 0.05, "a dead workspace to fail fast, took " + std::to_string(second));
  for (int rank = 0; rank < ranks.shape.cp; ++rank) {
    if (rank != kLost)
      expect(all_nan(ranks, rank, 8) && ranks.expiry(rank).call == 1, "NaN and the first report from a dead workspace");
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
inline void late(int) {
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
inline void refused(int) {
  Ranks ranks(kUsual);
  const auto refuses = [&](auto change, const std::string& what) {
    ExchangeParams p = ranks.params(0, 8);
    change(p);
    expect(problem(p) != nullptr && std::string(problem(p)).find(what) != std::string::npos,
           "a complaint about " + what);
  };
  refuses([](ExchangeParams& p) { p.cp = 65; }, "cp");
  refuses([](ExchangeParams& p) { p.dim = 12; }, "dim");
  refuses([](ExchangeParams& p) { p.dim = 6, p.dtype = Dtype::float32; }, "dim");
  refuses([](ExchangeParams& p) { p.dtype = static_cast<Dtype>(3); }, "dtype");
  refuses([](ExchangeParams& p) { p.tokens = 9; }, "more rows");
  refuses([](ExchangeParams& p) { p.capacity = 1 << 22; }, "GiB per source");
  refuses([](ExchangeParams& p) { p.capacity = (1 << 26) / 7 + 1, p.dim = 8; }, "2^26");
  refuses([](ExchangeParams& p) { p.tokens = 0; }, "tokens");
  refuses([](ExchangeParams& p) { p.heads_per_rank = 7; }, "heads_per_rank");
  refuses([](ExchangeParams& p) { p.o_head_stride = 516; }, "strides");
  refuses([](ExchangeParams& p) { p.o = static_cast<const char*>(p.o) + 8; }, "aligned");
  refuses([](ExchangeParams& p) { p.timeout_ns = 0; }, "time-out");
  expect(problem(ranks.params(0, 8)) == nullptr, "no complaint about a good call");
}

}  // namespace jaxcp::test

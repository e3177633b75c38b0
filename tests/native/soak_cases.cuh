// Many calls: skewed, under traffic, of random sizes, of two exchanges in turn.
#pragma once

#include <memory>
#include <random>

#include "ranks.cuh"

namespace jaxcp::test {

using Random = std::mt19937;
inline int between(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

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
    for (int rank = 0; rank < sets_[0]->shape.cp; ++rank)
      expect(!sets_[0]->expiry(rank).expired, what + ": no expired wait");
  }
  Ranks& ranks() { return *sets_[0]; }

 private:
  std::vector<std::unique_ptr<Ranks>> sets_;
  std::vector<std::vector<Buffer<uint16_t>>> expected_;
};

// One rank at a time is late by up to a millisecond. With 9 heads on 8 ranks, ranks 5 to 7 keep no head at all.
inline void skew(int calls) {
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
inline void tearing(int calls) {
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
  const double lines =
      double(calls) * shape.cp * (shape.cp - 1) * shape.tokens * shape.heads_per_rank() * shape.dim * 2 / 128;
  std::printf("%.2g lines; ", lines);
}

// Random sizes, many calls.
inline void soak(int calls) {
  Soak soak({8, 16, 128, 512});
  Random random(2);
  for (int n = 0; n < calls; ++n) soak.call(n, between(random, 1, between(random, 0, 7) == 0 ? 16 : 3));
  soak.finish("random sizes");
}

// Two exchanges of different shapes take turns on the same streams.
inline void alternating(int calls) {
  Soak one({8, 4, 64, 512}), other({8, 6, 24, 128, Dtype::float16, Base::e});
  for (int n = 0; n < calls / 2; ++n) {
    one.call(n, 1 + n % 4);
    other.call(n, 1 + n % 6);
  }
  one.finish("first exchange");
  other.finish("second exchange");
}

}  // namespace jaxcp::test

// The host twin by itself, so that sanitizers can see it (they cannot see through jaxlib): ranks as threads of this
// process, calls of random sizes, results against a merge written out here, ranks that do not come or come too late,
// and the largest calls.
//
// twin_test CALLS
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "twin.h"

namespace {

using namespace jaxcp;

constexpr uint64_t kSecond = 1000000000;

struct Group {
  Group(int cp, int heads, int dim, int max_tokens) : cp(cp), heads(heads), dim(dim), max_tokens(max_tokens), blocks(cp), status(cp) {
    for (auto& block : blocks) {
      block.reset(static_cast<uint8_t*>(std::aligned_alloc(128, (layout().bytes() + 127) / 128 * 128)));
    }
    blank();
  }

  int rows_per_token() const { return (heads + cp - 1) / cp; }
  Layout layout() const { return {cp, max_tokens * rows_per_token(), dim * 2}; }

  void blank() {
    for (auto& block : blocks) {
      std::memset(block.get(), 0, sizeof(Control));
      std::memset(block.get() + sizeof(Control), 0xFF, layout().bytes() - sizeof(Control));
    }
    std::fill(status.begin(), status.end(), 0);
  }

  ExchangeParams params(int rank, int tokens, const uint16_t* o, const float* lse, uint16_t* out, float* out_lse, uint64_t timeout) {
    ExchangeParams p{};
    p.o = o, p.lse = lse, p.out = out, p.out_lse = out_lse;
    p.o_token_stride = int64_t{heads} * dim, p.o_head_stride = dim, p.lse_token_stride = heads, p.lse_head_stride = 1;
    p.tokens = tokens, p.heads = heads, p.heads_per_rank = rows_per_token(), p.dim = dim;
    p.dtype = Dtype::bfloat16, p.base = Base::two, p.rank = rank, p.cp = cp, p.capacity = layout().capacity;
    p.timeout_ns = timeout, p.status = &status[rank];
    for (int i = 0; i < cp; ++i) p.workspaces[i] = blocks[i].get();
    return p;
  }

  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  const int cp, heads, dim, max_tokens;
  std::vector<std::unique_ptr<uint8_t, Free>> blocks;
  std::vector<uint64_t> status;
};

[[noreturn]] void fail(const char* what, int call, int rank, int row) {
  std::fprintf(stderr, "%s: call %d, rank %d, row %d\n", what, call, rank, row);
  std::exit(1);
}

struct Partials {
  std::vector<uint16_t> o;
  std::vector<float> lse;
};

Partials random_partials(const Group& g, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Partials p{std::vector<uint16_t>(static_cast<size_t>(g.max_tokens * g.heads * g.dim)), std::vector<float>(static_cast<size_t>(g.max_tokens * g.heads))};
  for (auto& x : p.o) x = random() % 97 == 0 ? 0xFFFF : twin::narrow(normal(random), Dtype::bfloat16);  // some look blank
  for (auto& x : p.lse) x = 4 * normal(random);
  return p;
}

// Merge in double precision; NaN where an input is.
double merged(const Group& g, const std::vector<Partials>& all, int token, int head, int i) {
  double sum = 0, out = 0;
  for (const Partials& p : all) sum += std::exp2(static_cast<double>(p.lse[token * g.heads + head]));
  for (const Partials& p : all) {
    out += std::exp2(static_cast<double>(p.lse[token * g.heads + head])) / sum *
           twin::widen(p.o[(token * g.heads + head) * g.dim + i], Dtype::bfloat16);
  }
  return out;
}

void check(const Group& g, const std::vector<Partials>& all, const std::vector<uint16_t>& out, int rank, int tokens, int call) {
  const int h = g.rows_per_token();
  for (int row = 0; row < tokens * h; ++row) {
    const int head = rank * h + row % h;
    for (int i = 0; i < g.dim; ++i) {
      const float got = twin::widen(out[row * g.dim + i], Dtype::bfloat16);
      const double want = head < g.heads ? merged(g, all, row / h, head, i) : 0;
      const bool right = std::isnan(want) ? std::isnan(got) : std::fabs(got - want) <= 0.01 * std::fabs(want) + 1e-5;
      if (!right) fail("wrong result", call, rank, row);
    }
  }
}

// Calls of random sizes on all ranks. Three sets of inputs in turn, so that a word left in one of two slots is never the
// one that is waited for.
void many_calls(Group& g, int calls) {
  constexpr int kSets = 3;
  std::mt19937 random(1);
  std::vector<std::vector<Partials>> sets(kSets);
  for (auto& set : sets) {
    for (int r = 0; r < g.cp; ++r) set.push_back(random_partials(g, random));
  }
  std::vector<int> sizes(static_cast<size_t>(calls));
  for (int& size : sizes) size = 1 + static_cast<int>(random() % static_cast<unsigned>(g.max_tokens));
  std::vector<std::thread> ranks;
  for (int r = 0; r < g.cp; ++r) {
    ranks.emplace_back([&, r] {
      std::vector<uint16_t> out(static_cast<size_t>(g.layout().capacity * g.dim));
      std::vector<float> lse(static_cast<size_t>(g.layout().capacity));
      for (int call = 0; call < calls; ++call) {
        const std::vector<Partials>& set = sets[call % kSets];
        if ((call + r) % 7 == 0) std::this_thread::yield();
        twin::exchange(g.params(r, sizes[call], set[r].o.data(), set[r].lse.data(), out.data(), lse.data(), 60 * kSecond));
        if (g.status[r] != 0) fail("a wait expired", call, r, Expiry::unpacked(g.status[r]).row);
        check(g, set, out, r, sizes[call], call);
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

// Rank 0 does not come: the others report it, give NaN, and a reset revives the group.
void absent(Group& g) {
  std::mt19937 random(2);
  const Partials p = random_partials(g, random);
  std::vector<std::vector<uint16_t>> outs(static_cast<size_t>(g.cp), std::vector<uint16_t>(static_cast<size_t>(g.layout().capacity * g.dim)));
  std::vector<std::thread> ranks;
  for (int r = 1; r < g.cp; ++r) {
    ranks.emplace_back([&, r] { twin::exchange(g.params(r, 1, p.o.data(), p.lse.data(), outs[r].data(), nullptr, kSecond / 20)); });
  }
  for (auto& rank : ranks) rank.join();
  for (int r = 1; r < g.cp; ++r) {
    const Expiry expiry = Expiry::unpacked(g.status[r]);
    if (!expiry.expired || expiry.peer != 0) fail("no report of the absent rank", 0, r, 0);
    if (!std::isnan(twin::widen(outs[r][0], Dtype::bfloat16))) fail("not NaN", 0, r, 0);
  }
  g.blank();
}

// Rank 0 gives up in call 0, and what it waited for comes afterwards. Its call 2, on the same slot, must not take that.
void stale(Group& g) {
  std::mt19937 random(3);
  const Partials p = random_partials(g, random);
  std::vector<uint16_t> out(static_cast<size_t>(g.layout().capacity * g.dim));
  std::vector<float> lse(static_cast<size_t>(g.layout().capacity));
  const auto call = [&](uint64_t timeout) {
    twin::exchange(g.params(0, g.max_tokens, p.o.data(), p.lse.data(), out.data(), lse.data(), timeout));
  };
  call(kSecond / 20);
  std::vector<std::thread> others;
  for (int r = 1; r < g.cp; ++r) {
    others.emplace_back([&, r] {
      std::vector<uint16_t> theirs(out.size());
      twin::exchange(g.params(r, g.max_tokens, p.o.data(), p.lse.data(), theirs.data(), nullptr, 60 * kSecond));
      if (g.status[r] != 0) fail("rank 0 sent too little", 0, r, Expiry::unpacked(g.status[r]).row);
    });
  }
  for (auto& other : others) other.join();
  for (int n = 1; n <= 2; ++n) {
    std::fill(out.begin(), out.end(), 0), std::fill(lse.begin(), lse.end(), 0.0f);
    call(60 * kSecond);
    for (int row = 0; row < g.max_tokens * g.rows_per_token(); ++row) {
      bool nan = std::isnan(lse[row]);
      for (int i = 0; i < g.dim; ++i) nan &= std::isnan(twin::widen(out[row * g.dim + i], Dtype::bfloat16));
      if (!nan) fail("a dead workspace gave a result", n, 0, row);
    }
  }
  g.blank();
}

// The largest calls that problem() lets through, and the next ones, which it refuses before their offsets wrap.
void bounds(Group& g) {
  alignas(16) static uint16_t rows[8];
  float lse = 0;
  const auto accepts = [&](Dtype dtype, int dim, int64_t capacity, bool expected) {
    ExchangeParams p = g.params(0, 1, rows, &lse, rows, nullptr, kSecond);
    p.dtype = dtype, p.dim = dim, p.o_head_stride = dim, p.o_token_stride = int64_t{dim} * g.heads;
    p.capacity = static_cast<int32_t>(capacity);
    if ((problem(p) == nullptr) != expected) fail(expected ? problem(p) : "a call that cannot run", dim, g.cp, p.capacity);
  };
  accepts(Dtype::bfloat16, 8, 16, true), accepts(Dtype::bfloat16, 4, 16, false);
  accepts(Dtype::float32, 4, 16, true), accepts(Dtype::float32, 2, 16, false);
  accepts(static_cast<Dtype>(3), 8, 16, false);
  const int64_t sends = (1 << 26) - 1, row = 512 * 4;
  const int64_t most = std::min<int64_t>(sends / (g.cp - 1), kMaxRows - 1);
  accepts(Dtype::float16, 8, most, true), accepts(Dtype::float16, 8, most + 1, false);
  accepts(Dtype::float32, 512, ((int64_t{1} << 32) - 1) / row, true);
  accepts(Dtype::float32, 512, (int64_t{1} << 32) / row, false);
}

}  // namespace

int main(int count, char** arguments) {
  const int calls = count > 1 ? std::atoi(arguments[1]) : 200;
  for (const int cp : {2, 3, 8}) {
    Group g(cp, 2 * cp - 1, 16, 3);
    many_calls(g, calls);
    g.blank();
    absent(g);
    stale(g);
    bounds(g);
    many_calls(g, 3);
  }
  std::puts("ok");
}

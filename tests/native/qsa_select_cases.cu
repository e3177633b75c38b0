// Block selection on a GPU against std::stable_sort, bit for bit: inputs whose scores are exact sums.
//
// qsa_select_cases          names of the cases
// qsa_select_cases NAME     runs one; "small" is for sanitizers
#include <functional>
#include <map>

#include "qsa_select_problem.cuh"

namespace {

using namespace jaxcp::test;
using jaxcp::qsa::kStreamBytes;
using jaxcp::qsa::ScoredRows;

using Random = std::mt19937;
float uniform(Random& random) { return static_cast<float>(random() >> 8) * 0x1p-24f; }

struct Kind {
  const char* name;
  float (*score)(Random&, int i, int n);
};
// Not negative and of at most 24 bits below 2^14: three bf16 pieces hold such a score exactly.
const Kind kKinds[] = {
    {"random", [](Random& r, int, int) { return uniform(r); }},
    {"few values", [](Random& r, int, int) { return static_cast<float>(r() % 3); }},
    {"zeros", [](Random&, int, int) { return 0.0f; }},
    {"nearly equal", [](Random& r, int, int) { return 1 + static_cast<float>(r() % 16) * 0x1p-23f; }},
    {"mostly zero", [](Random& r, int, int) { return r() % 40 == 0 ? uniform(r) : 0.0f; }},
    {"rising", [](Random&, int i, int) { return 1 + static_cast<float>(i) * 0.125f; }},
    {"falling", [](Random&, int i, int n) { return static_cast<float>(n - i) * 0.125f; }},
    {"late winners", [](Random& r, int i, int n) { return i > n - 600 ? 1 + uniform(r) : uniform(r); }},
};
const Kind kMore[] = {
    {"wide", [](Random& r, int, int) { return std::ldexp(uniform(r), static_cast<int>(r() % 250) - 120); }},
    {"infinite", [](Random& r, int, int) { return r() % 5 == 0 ? INFINITY : uniform(r); }},
    {"NaN",
     [](Random& r, int, int) {
       return r() % 99 == 0 ? std::bit_cast<float>(0x7FFFFFFFu) : r() % 60 == 0 ? INFINITY : uniform(r);
     }},
    {"runs of equals", [](Random&, int i, int) { return static_cast<float>(i / 37 % 5); }},
};

// Selections from given scores; rows of one length with various visible counts, these too.
void top_blocks(int n, int k, const Kind& kind, Random& random, const std::vector<int>& counts = {}) {
  std::vector<int> visible = {n, n - 1, k, k + 1, k - 1, 0, n / 2, n / 3 + k};
  visible.insert(visible.end(), counts.begin(), counts.end());
  const int64_t stride = (n + 63) / 64 * 64;
  std::vector<float> scores(visible.size() * stride, NAN);
  std::vector<int32_t> position;
  for (size_t row = 0; row < visible.size(); ++row) {
    position.push_back(std::clamp(visible[row], 0, n) - 1);
    for (int i = 0; i <= position[row]; ++i) scores[row * stride + i] = kind.score(random, i, n);
  }
  const auto rows = static_cast<int32_t>(visible.size());
  std::vector<std::vector<int32_t>> want;
  for (int row = 0; row < rows; ++row) want.push_back(answer(&scores[row * stride], position[row] + 1, k));
  // A few long rows take a cluster of blocks each, more take one, many a smaller one: the same ones again and again.
  for (const int copies : {1, 10, 80}) {
    if (copies > 10 && n > 10000) break;
    std::vector<float> all;
    std::vector<int32_t> positions;
    for (int i = 0; i < copies; ++i) {
      all.insert(all.end(), scores.begin(), scores.end());
      positions.insert(positions.end(), position.begin(), position.end());
    }
    const Device<float> on_device(all);
    const Device<int32_t> at(positions);
    Device<int32_t> ids(positions.size() * k);
    ids.fill(0x55);
    CHECK(launch_top_blocks(ScoredRows{on_device.get(), stride, at.get(), ids.get(), rows * copies, k, 1, n}, nullptr));
    const std::vector<int32_t> got = ids.host();
    for (int row = 0; row < rows * copies; ++row) {
      if (std::equal(want[row % rows].begin(), want[row % rows].end(), &got[size_t{1} * row * k])) continue;
      throw std::runtime_error(std::string("given scores, ") + kind.name + ": n " + std::to_string(n) + ", k " +
                               std::to_string(k) + ", row " + std::to_string(row));
    }
  }
}

void given() {
  Random random(1);
  for (const int k : {1, 16, 512, 2048}) {
    for (const int n : {1, 2, 33, 513, 2049, 8192, 8200, 32768, 65536}) {
      for (const Kind& kind : kKinds) top_blocks(n, k, kind, random);
      for (const Kind& kind : kMore) top_blocks(n, k, kind, random);
    }
  }
}

// Rows that clusters take: lengths about those at which their kernels and the blocks' parts change, ends of parts among
// them, and more to select than there are groups of keys to bound the cut with.
void clusters() {
  Random random(7);
  const std::vector<int> counts = {4095, 4096, 4097, 4351, 4352, 4353, 255, 256, 257, 2049};
  for (const int n : {4097, 32767, 32769, 65537}) {
    for (const Kind& kind : kKinds) top_blocks(n, 512, kind, random, counts);
    for (const Kind& kind : kMore) top_blocks(n, 512, kind, random, counts);
  }
  for (const int k : {1, 33, 1024, 4000, 5000}) {
    for (const Kind& kind : {kKinds[0], kKinds[2], kKinds[3], kKinds[4]}) top_blocks(32768, k, kind, random, counts);
  }
}

// A million tokens.
void longest() {
  Random random(8);
  for (const int n : {262144, 262143}) {
    for (const Kind& kind : {kKinds[0], kKinds[2], kKinds[3], kKinds[4], kMore[2]}) top_blocks(n, 512, kind, random);
    top_blocks(n, 2048, kKinds[0], random);
  }
}

// Rows in runs of ragged lengths and random requests, some of them padding; positions ascend in a run.
void make_rows(Problem& p, int rows, int run, Random& random) {
  const int tokens = p.sizes.blocks * p.sizes.ratio + p.sizes.ratio - 1;
  const std::vector<int> edges = {0, p.sizes.k * p.sizes.ratio - 2, (p.sizes.k + 1) * p.sizes.ratio - 2, tokens - run};
  p.longest = run;
  while (p.rows() < rows) {
    const int request = random() % p.sizes.requests, length = 1 + random() % run;
    int position = random() % 2 == 0 ? edges[random() % edges.size()] : static_cast<int>(random() % tokens);
    const bool padding = random() % 6 == 0;
    for (int i = 0; i < length && p.rows() < rows; ++i) {
      p.request.push_back(request), p.position.push_back(padding ? -1 : std::clamp(position++, 0, tokens - 1));
    }
  }
}

// Row r reads dims 3 j ... 3 j + 2 of the keys, j = r mod dim / 3: a set of scores of its own, whatever it is to be.
Problem chosen_scores(const Sizes& sizes, const Kind& kind, int rows, int run, Random& random) {
  Problem p{sizes};
  make_rows(p, rows, run, random);
  const int sets = sizes.dim / 3;
  p.keys.assign(size_t{1} * sizes.requests * sizes.blocks * sizes.dim, 0);
  for (size_t key = 0; key < p.keys.size() / sizes.dim; ++key) {
    for (int j = 0; j < sets; ++j) {
      float left = kind.score(random, static_cast<int>(key) % sizes.blocks, sizes.blocks);
      for (int piece = 0; piece < 3; ++piece) {
        const float part = std::bit_cast<float>(std::bit_cast<uint32_t>(left) & 0xFFFF0000u);
        p.keys[key * sizes.dim + 3 * j + piece] = part, left -= part;
      }
      if (left != 0) throw std::runtime_error("a score of more than 24 bits");
    }
  }
  p.queries.assign(size_t{1} * rows * sizes.heads * sizes.dim, 0);
  for (int row = 0; row < rows; ++row) {
    float* q = &p.queries[(size_t{1} * row * sizes.heads + row % sizes.heads) * sizes.dim + row % sets * 3];
    q[0] = q[1] = q[2] = 1;
  }
  return p;
}

// Small integers: every product and sum is exact, and so are float16's and e4m3's.
Problem integers(const Sizes& sizes, int rows, int run, Random& random) {
  Problem p{sizes};
  make_rows(p, rows, run, random);
  const auto draw = [&](std::vector<float>& to, size_t count) {
    to.resize(count);
    for (float& x : to) x = static_cast<float>(static_cast<int>(random() % 9) - 4);
  };
  draw(p.keys, size_t{1} * sizes.requests * sizes.blocks * sizes.dim);
  draw(p.queries, size_t{1} * rows * sizes.heads * sizes.dim);
  return p;
}

void judge(const Problem& p, const std::string& what) {
  Run run(p);
  const std::vector<int32_t> want = p.answers();
  const int64_t stride = (p.sizes.blocks + 63) / 64 * 64;
  for (const int64_t at_once : {int64_t{p.rows()}, int64_t{37}})
    run.judge(want, Method::stored, at_once * stride * 4, what + ", stored");
  if (p.sizes.k > jaxcp::qsa::kMaxStreamedK || p.sizes.heads > jaxcp::qsa::kMaxStreamedHeads) return;
  for (const int64_t blocks : {160, 1}) run.judge(want, Method::streaming, blocks * kStreamBytes, what + ", streaming");
}

void chosen() {
  Random random(2);
  for (const Kind& kind : kKinds) {
    for (const int k : {1, 100, 512}) {
      Sizes sizes;
      sizes.k = k, sizes.blocks = 2500, sizes.heads = 1 + random() % 4;
      judge(chosen_scores(sizes, kind, 150, 60, random), std::string(kind.name) + ", k " + std::to_string(k));
      judge(chosen_scores(sizes, kind, 20, 4, random), std::string(kind.name) + ", short runs, k " + std::to_string(k));
    }
  }
}

void summed() {
  Random random(3);
  for (int heads = 1; heads <= 8; ++heads) {
    for (const int dim : {64, 128}) {
      for (const bool e4m3 : {false, true}) {
        Sizes sizes;
        sizes.heads = heads, sizes.dim = dim, sizes.e4m3 = e4m3, sizes.k = 64 + random() % 449,
        sizes.blocks = 1300 + random() % 600;
        sizes.ratio = 1 + random() % 5, sizes.page_blocks = 1 + random() % 20;
        judge(integers(sizes, 100, heads % 2 == 0 ? 50 : 5, random),
              "integers, heads " + std::to_string(heads) + ", dim " + std::to_string(dim) + (e4m3 ? ", e4m3" : ""));
      }
    }
  }
}

// Few blocks, more than 512 to select, one row, the longest row.
void sizes() {
  Random random(4);
  for (const int blocks : {1, 2, 31, 64, 65, 129}) {
    Sizes sizes;
    sizes.blocks = blocks, sizes.k = std::max(1, blocks / 2), sizes.requests = 5;
    judge(integers(sizes, 70, 9, random), std::to_string(blocks) + " blocks");
  }
  Sizes sizes;
  sizes.k = 2048, sizes.blocks = 4100;
  judge(integers(sizes, 30, 30, random), "k 2048");
  sizes = Sizes{}, sizes.requests = 1, sizes.blocks = 65536;
  for (const Kind& kind : {kKinds[3], kKinds[5]})
    judge(chosen_scores(sizes, kind, 3, 3, random), std::string("65536 blocks, ") + kind.name);
}

void small() {
  Random random(5);
  Sizes sizes;
  sizes.blocks = 1200, sizes.k = 100, sizes.requests = 2;
  judge(chosen_scores(sizes, kKinds[5], 20, 20, random), "small, rising");
  sizes.e4m3 = true, sizes.dim = 64, sizes.heads = 5;
  judge(integers(sizes, 20, 4, random), "small, integers");
}

// The same bits again and again.
void repeated() {
  Random random(6);
  Sizes sizes;
  sizes.blocks = 3000;
  const Problem p = chosen_scores(sizes, kKinds[1], 700, 300, random);
  Run run(p);
  const auto first = run.ids(Method::streaming, 8 * kStreamBytes);
  for (int i = 0; i < 20; ++i) {
    if (run.ids(Method::streaming, (1 + i) * kStreamBytes) != first)
      throw std::runtime_error("another selection, streaming");
    if (run.ids(Method::stored, 700 * 3008 * 4) != first) throw std::runtime_error("another selection, stored");
  }
}

const std::map<std::string, std::function<void()>> kCases = {
    {"given", given},   {"clusters", clusters}, {"long", longest}, {"chosen", chosen},
    {"summed", summed}, {"sizes", sizes},       {"small", small},  {"repeated", repeated}};

}  // namespace

int main(int count, char** arguments) {
  if (count == 1) {
    for (const auto& [name, run] : kCases) std::printf("%s\n", name.c_str());
    return 0;
  }
  try {
    CHECK(jaxcp::qsa::load_select());
    kCases.at(arguments[1])();
  } catch (const std::exception& error) {
    std::printf("%s: FAILED: %s\n", arguments[1], error.what());
    return 1;
  }
  std::printf("%s: ok\n", arguments[1]);
}

// The selection's core on the host, one thread doing the work of a warp or a block, against std::stable_sort: the cut of
// a row by histograms, and the list of candidates that a row's scores stream into. Prints "ok".
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "qsa/select_cut.h"

namespace {

using namespace jaxcp::qsa;

struct Alone {
  int32_t sum(int32_t x) const { return x; }
  int32_t max(int32_t x) const { return x; }
  uint32_t max(uint32_t x) const { return x; }
  uint32_t min(uint32_t x) const { return x; }
  uint32_t ballot(bool x) const { return x; }
  int32_t count_before(uint32_t) const { return 0; }
};

struct Found {
  uint32_t digit;
  int32_t above, inside;
};

struct Team {
  std::vector<int32_t> bins = std::vector<int32_t>(Range::kDigits);
  int passes = 0;

  template <class F>
  void each(const uint32_t* scores, int32_t n, F f) const {
    for (int32_t i = 0; i < n; ++i) f(order_key(scores[i]));
  }
  void extremes(uint32_t&, uint32_t&) const {}
  void clear_bins() {
    std::fill(bins.begin(), bins.end(), 0);
    ++passes;
  }
  void count(uint32_t digit) { ++bins.at(digit); }
  Found find(int32_t wanted) const {
    uint32_t digit = Range::kDigits - 1;
    int32_t above = 0;
    while (above + bins[digit] < wanted) above += bins.at(digit--);
    return {digit, above, bins[digit]};
  }
};

using Ids = std::vector<int32_t>;

Ids sorted(const std::vector<float>& scores, int32_t k) {
  Ids ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto key = [&](int32_t id) { return order_key(std::bit_cast<uint32_t>(scores[id] == 0 ? 0.0f : scores[id])); };
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
  ids.resize(std::min<size_t>(ids.size(), k));
  std::sort(ids.begin(), ids.end());
  return ids;
}

[[noreturn]] void fail(const std::string& what, const std::string& kind, size_t n, int32_t k) {
  std::fprintf(stderr, "%s: %s, %zu scores, k %d\n", what.c_str(), kind.c_str(), n, k);
  std::exit(1);
}

// As top_blocks does, warp after warp.
void check_row(const std::vector<float>& scores, int32_t k, const std::string& kind) {
  const auto* bits = reinterpret_cast<const uint32_t*>(scores.data());
  const auto n = static_cast<int32_t>(scores.size());
  Team team;
  const Cut<uint32_t> cut = row_cut(team, bits, n, k);
  if (team.passes > 3) fail("more than three passes", kind, scores.size(), k);
  Places places{0, cut.ties};
  Ids ids(static_cast<size_t>(k), -1);
  for (int32_t i = 0; i < n; ++i) {
    const uint32_t key = order_key(bits[i]);
    if (const int32_t place = places.take(Alone(), key > cut.key, key == cut.key); place >= 0) ids.at(place) = i;
  }
  if (places.next != k || ids != sorted(scores, k)) fail("a stored row", kind, scores.size(), k);
}

// As stream_blocks does: `room` places, cut back when no step of `step` neighbours fits any more.
template <int kRoom>
struct List {
  int32_t key[kRoom];
  Ids ids = Ids(kRoom);
  int32_t count = 0, threshold = -1, cuts = 0;

  void push(int32_t k, int32_t id) { key[count] = k, ids.at(count++) = id; }
  Cut<int32_t> cut_back(int32_t wanted, int32_t enough) {
    std::fill(key + count, key + kRoom, -1);
    const Cut<int32_t> cut = warp_cut(Alone(), key, wanted, enough);
    Places places{0, cut.ties};
    for (int32_t i = 0; i < count; ++i) {
      const int32_t place = places.take(Alone(), key[i] > cut.key, key[i] == cut.key);
      if (place >= 0) key[place] = key[i], ids[place] = ids[i];
    }
    count = places.next, threshold = cut.key, ++cuts;
    return cut;
  }
};

template <int kRoom>
void check_stream(const std::vector<float>& scores, int32_t k, int32_t step, const std::string& kind) {
  List<kRoom> list;
  const int32_t enough = k + (kRoom - k) / 8;
  for (size_t first = 0; first < scores.size(); first += step) {
    const int32_t bar = list.threshold;
    for (size_t i = first; i < std::min(first + step, scores.size()); ++i) {
      const auto bits = std::bit_cast<int32_t>(scores[i]);
      if (bits > bar) list.push(bits, static_cast<int32_t>(i));
    }
    if (list.count > kRoom - step) list.cut_back(k, enough);
    if (list.count > kRoom - step) fail("a cut makes no room", kind, scores.size(), k);
  }
  list.cut_back(k, k);
  list.ids.resize(list.count);
  if (list.ids != sorted(scores, k)) fail("a streamed row", kind, scores.size(), k);
  const size_t most = 2 + scores.size() / (kRoom - step - enough);
  if (static_cast<size_t>(list.cuts) > most) fail("more cuts than the worst order needs", kind, scores.size(), k);
}

struct Kind {
  const char* name;
  float (*score)(std::mt19937&, int32_t i, int32_t n);
};
float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-24f; }

const Kind kPositive[] = {
    {"random", [](std::mt19937& r, int32_t, int32_t) { return uniform(r); }},
    {"wide", [](std::mt19937& r, int32_t, int32_t) { return std::ldexp(uniform(r), static_cast<int>(r() % 250) - 120); }},
    {"few values", [](std::mt19937& r, int32_t, int32_t) { return static_cast<float>(r() % 3); }},
    {"zeros", [](std::mt19937&, int32_t, int32_t) { return 0.0f; }},
    {"nearly equal", [](std::mt19937& r, int32_t, int32_t) { return 1 + static_cast<float>(r() % 16) * 0x1p-23f; }},
    {"mostly zero", [](std::mt19937& r, int32_t, int32_t) { return r() % 40 == 0 ? uniform(r) : 0.0f; }},
    {"rising", [](std::mt19937&, int32_t i, int32_t) { return 1 + static_cast<float>(i); }},
    {"falling", [](std::mt19937&, int32_t i, int32_t n) { return static_cast<float>(n - i); }},
    {"NaN and infinity", [](std::mt19937& r, int32_t, int32_t) { return r() % 9 == 0 ? std::bit_cast<float>(0x7FFFFFFFu) : r() % 5 == 0 ? INFINITY : uniform(r); }},
};
const Kind kSigned[] = {
    {"normal", [](std::mt19937& r, int32_t, int32_t) { return uniform(r) + uniform(r) - uniform(r) - uniform(r); }},
    {"signed zeros", [](std::mt19937& r, int32_t, int32_t) { return r() % 2 == 0 ? 0.0f : -0.0f; }},
    {"zeros and little", [](std::mt19937& r, int32_t, int32_t) { return std::copysign(r() % 3 == 0 ? 1e-40f : 0.0f, r() % 2 == 0 ? 1.0f : -1.0f); }},
    {"all bits", [](std::mt19937& r, int32_t, int32_t) { return std::bit_cast<float>(static_cast<uint32_t>(r())); }},
};

std::vector<float> row(const Kind& kind, int32_t n, std::mt19937& random) {
  std::vector<float> scores(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) scores[i] = kind.score(random, i, n);
  return scores;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const int32_t k : {1, 16, 512, 2048}) {
    for (const int32_t n : {k + 1, k + 2, 2 * k + 5, 5000, 65536}) {
      if (n <= k) continue;
      for (const Kind& kind : kSigned) check_row(row(kind, n, random), k, kind.name);
      for (const Kind& kind : kPositive) {
        const auto scores = row(kind, n, random);
        check_row(scores, k, kind.name);
        if (k > 512) continue;
        check_stream<1024>(scores, k, 32, kind.name);
        check_stream<1024>(scores, k, 16, kind.name);
      }
    }
  }
  std::puts("ok");
}

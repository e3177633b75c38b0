// The selection's core on the host, one thread doing the work of a warp, a block or a cluster of blocks, against
// std::stable_sort: the cut of a row by histograms, of the whole one and of parts of it, and the list of candidates
// that a row's scores stream into. Prints "ok".
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "qsa/select_cut.h"

namespace {

using namespace jaxcp::qsa;

struct Alone {
  uint32_t ballot(bool x) const { return x; }
  int32_t count_before(uint32_t) const { return 0; }
};

// A team of one: `Bits` wide digits over the keys that `each` gives it.
template <int kBits>
struct Team {
  static constexpr int kDigitBits = kBits;

  std::vector<uint32_t> keys;
  uint32_t least = 0;  // where the first range begins; at least `wanted` keys reach it
  std::vector<int32_t> bins = std::vector<int32_t>(1 << kBits);
  int passes = 0;

  template <class F>
  void each(F f) const {
    for (const uint32_t key : keys) f(key);
  }
  Range range(int32_t wanted) const { return {least, *std::max_element(keys.begin(), keys.end()), wanted}; }
  void clear_bins() {
    std::fill(bins.begin(), bins.end(), 0);
    ++passes;
  }
  void count_if(bool condition, uint32_t digit) {
    if (condition) ++bins.at(digit);
  }
  Found find(int32_t wanted) const {
    uint32_t digit = (1 << kBits) - 1;
    int32_t above = 0;
    while (above + bins.at(digit) < wanted) above += bins[digit--];
    return {digit, above, bins[digit]};
  }
};

// A row in parts, each with bins of its own, as a cluster of blocks has it; `before`: of each part.
struct Parts : Team<8> {
  static constexpr size_t kParts = 8;

  std::vector<std::vector<int32_t>> bins_of{kParts, std::vector<int32_t>(256)};
  std::vector<Before> before{kParts};

  // Of more than one key: only a pass tells what the parts hold.
  Range range(int32_t wanted) const { return {0, std::max(Team::range(wanted).high, 1u), wanted}; }
  size_t part() const { return (keys.size() + kParts - 1) / kParts; }
  template <class F>
  void each(F f) {
    for (at = 0; at < keys.size(); ++at) f(keys[at]);
  }
  void clear_bins() {
    Team::clear_bins();
    for (auto& bins : bins_of) std::fill(bins.begin(), bins.end(), 0);
  }
  void count_if(bool condition, uint32_t digit) {
    Team::count_if(condition, digit);
    if (condition) ++bins_of[at / part()].at(digit);
  }
  Found find(int32_t wanted) {
    const Found found = Team::find(wanted);
    int32_t above = 0, inside = 0;
    for (size_t i = 0; i < kParts; ++i) {
      before[i].narrow(above, inside);
      above = std::accumulate(bins_of[i].begin() + found.digit + 1, bins_of[i].end(), above);
      inside += bins_of[i][found.digit];
    }
    return found;
  }

 private:
  size_t at = 0;
};

using Ids = std::vector<int32_t>;

Ids sorted(const std::vector<float>& scores, int32_t k) {
  Ids ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto rank = [&](int32_t id) {
    return std::isnan(scores[id]) ? INFINITY : std::isinf(scores[id]) ? std::numeric_limits<float>::max() : scores[id];
  };
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return rank(a) > rank(b); });
  ids.resize(std::min<size_t>(ids.size(), k));
  std::sort(ids.begin(), ids.end());
  return ids;
}

[[noreturn]] void fail(const std::string& what, const std::string& kind, size_t n, int32_t k) {
  std::fprintf(stderr, "%s: %s, %zu scores, k %d\n", what.c_str(), kind.c_str(), n, k);
  std::exit(1);
}

// As top_blocks does, from the lowest and from the highest key that the first range may begin at.
void check_row(const std::vector<float>& scores, int32_t k, const std::string& kind) {
  Team<11> team;
  for (const float score : scores) team.keys.push_back(std::bit_cast<uint32_t>(score));
  std::vector<uint32_t> sorted_keys = team.keys;
  std::sort(sorted_keys.begin(), sorted_keys.end(), std::greater());
  for (const uint32_t least : {uint32_t{0}, sorted_keys.back(), sorted_keys[k - 1]}) {
    team.least = least, team.passes = 0;
    const Cut cut = find_cut(team, k, k);
    if (team.passes > 3) fail("more than three passes", kind, scores.size(), k);
    Places places{0, cut.ties};
    Ids ids(static_cast<size_t>(k), -1);
    for (size_t i = 0; i < scores.size(); ++i) {
      const int32_t place = places.take(Alone(), team.keys[i] > cut.key, team.keys[i] == cut.key);
      if (place >= 0) ids.at(place) = static_cast<int32_t>(i);
    }
    if (places.next != k || ids != sorted(scores, k)) fail("a stored row", kind, scores.size(), k);
  }
}

// As cluster_top_blocks does: each part's places begin where what the search has learned of the ones before it says.
void check_parts(const std::vector<float>& scores, int32_t k, const std::string& kind) {
  Parts team;
  for (const float score : scores) team.keys.push_back(std::bit_cast<uint32_t>(score));
  const Cut cut = find_cut(team, k, k);
  if (team.passes > 4) fail("more than four passes", kind, scores.size(), k);
  Ids ids(static_cast<size_t>(k), -1);
  for (size_t part = 0; part < Parts::kParts; ++part) {
    Places places = team.before[part].of(cut).places(cut);
    for (size_t i = part * team.part(); i < std::min((part + 1) * team.part(), scores.size()); ++i) {
      const int32_t place = places.take(Alone(), team.keys[i] > cut.key, team.keys[i] == cut.key);
      if (place >= 0) ids.at(place) = static_cast<int32_t>(i);
    }
  }
  if (ids != sorted(scores, k)) fail("a row in parts", kind, scores.size(), k);
}

// As stream_blocks does: `room` places, cut back when no step of `step` neighbours fits any more.
struct List {
  struct Candidate {
    int32_t key, id;
  };
  std::vector<Candidate> candidates;
  int32_t threshold = -1, cuts = 0;

  void cut_back(int32_t wanted, int32_t enough) {
    Team<8> team;
    for (const Candidate& c : candidates) team.keys.push_back(static_cast<uint32_t>(c.key));
    team.least = *std::min_element(team.keys.begin(), team.keys.end());
    const Cut cut = find_cut(team, wanted, enough);
    if (team.passes > 4) fail("more than four passes", "a list", team.keys.size(), wanted);
    Places places{0, cut.ties};
    for (const Candidate c : candidates) {
      const auto bound = static_cast<int32_t>(cut.key);
      if (const int32_t place = places.take(Alone(), c.key > bound, c.key == bound); place >= 0) candidates[place] = c;
    }
    candidates.resize(places.next);
    threshold = static_cast<int32_t>(cut.bar()), ++cuts;
  }
};

void check_stream(const std::vector<float>& scores, int32_t k, int32_t step, const std::string& kind) {
  constexpr int32_t kRoom = 1024;
  List list;
  const int32_t enough = k + (kRoom - k) / 8, n = static_cast<int32_t>(scores.size());
  const auto count = [&] { return static_cast<int32_t>(list.candidates.size()); };
  for (int32_t first = 0; first < n; first += step) {
    const int32_t bar = list.threshold;
    for (int32_t i = first; i < std::min(first + step, n); ++i) {
      const auto bits = std::bit_cast<int32_t>(scores[i]);
      if (bits > bar) list.candidates.push_back({bits, i});
    }
    if (count() > kRoom - step) list.cut_back(k, enough);
    if (count() > kRoom - step) fail("a cut makes no room", kind, scores.size(), k);
  }
  const int32_t most = 1 + n / (kRoom - step - enough);
  if (list.cuts > most) fail("more cuts than the worst order needs", kind, scores.size(), k);
  if (count() > k) list.cut_back(k, k);
  Ids ids;
  for (const auto& c : list.candidates) ids.push_back(c.id);
  if (ids != sorted(scores, k)) fail("a streamed row", kind, scores.size(), k);
}

struct Kind {
  const char* name;
  float (*score)(std::mt19937&, int32_t i, int32_t n);
};
float uniform(std::mt19937& random) { return static_cast<float>(random() >> 8) * 0x1p-24f; }

const Kind kKinds[] = {
    {"random", [](std::mt19937& r, int32_t, int32_t) { return uniform(r); }},
    {"wide",
     [](std::mt19937& r, int32_t, int32_t) { return std::ldexp(uniform(r), static_cast<int>(r() % 250) - 120); }},
    {"few values", [](std::mt19937& r, int32_t, int32_t) { return static_cast<float>(r() % 3); }},
    {"zeros", [](std::mt19937&, int32_t, int32_t) { return 0.0f; }},
    {"nearly equal", [](std::mt19937& r, int32_t, int32_t) { return 1 + static_cast<float>(r() % 16) * 0x1p-23f; }},
    {"mostly zero", [](std::mt19937& r, int32_t, int32_t) { return r() % 40 == 0 ? uniform(r) : 0.0f; }},
    {"rising", [](std::mt19937&, int32_t i, int32_t) { return 1 + static_cast<float>(i); }},
    {"falling", [](std::mt19937&, int32_t i, int32_t n) { return static_cast<float>(n - i); }},
    {"NaN and infinity",
     [](std::mt19937& r, int32_t, int32_t) {
       return r() % 9 == 0 ? std::bit_cast<float>(0x7FFFFFFFu) : r() % 5 == 0 ? INFINITY : uniform(r);
     }},
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
      for (const Kind& kind : kKinds) {
        const auto scores = row(kind, n, random);
        check_row(scores, k, kind.name);
        check_parts(scores, k, kind.name);
        if (k > 512) continue;
        check_stream(scores, k, 32, kind.name);
        check_stream(scores, k, 16, kind.name);
      }
    }
  }
  std::puts("ok");
}

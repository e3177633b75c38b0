// The exact top k of a row: order of scores, search for the cut, places of what is kept. Written once for the GPU and
// the host (tests/native/qsa_select_twin.cc). A team is what searches together: the lanes of a warp over a list of
// candidates, the threads of a block over a row of scores (select_lanes.cuh), those of a cluster of blocks over parts
// of it (select_cluster.cuh), one thread on the host.
//
// A score is a sum of positive parts, so never negative nor -0, and its bits order as it does: they are its key. NaN,
// of which there is one (0x7FFFFFFF, max.NaN's), is above infinity, as in XLA's sort.
#pragma once

#include <cstdint>

#include "qsa/both.h"

namespace jaxcp::qsa {

// What a row keeps: every key above `key`, and of the keys equal to it the first `ties` in order of ids.
struct Cut {
  uint32_t key;
  int32_t ties;

  // Keys that come later, with larger ids, must be above this to be kept.
  JAXCP_BOTH uint32_t bar() const { return ties > 0 ? key : key + 1; }
};

JAXCP_BOTH int bit_length(uint32_t x) {
#ifdef __CUDA_ARCH__
  return 32 - __clz(static_cast<int>(x));
#else
  return x == 0 ? 0 : 32 - __builtin_clz(x);
#endif
}

JAXCP_BOTH int bit_count(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

// Places of what is kept, handed out in order of ids, some neighbours at a time.
struct Places {
  int32_t next;  // place of the next one
  int32_t ties;  // keys equal to the cut that may still come

  // The place of this lane's key, or -1 if it is not kept.
  template <class Warp>
  JAXCP_BOTH int32_t take(const Warp& warp, bool above, bool tied) {
    bool keep = above;
    if (ties > 0) {
      const uint32_t all_tied = warp.ballot(tied);
      keep = keep || (tied && warp.count_before(all_tied) < ties);
      ties -= bit_count(all_tied);
    }
    const uint32_t kept = warp.ballot(keep);
    const int32_t place = next + warp.count_before(kept);
    next += bit_count(kept);
    return keep ? place : -1;
  }
};

// Keys in the parts of a row that come before a part: above what a search has found so far, and inside of it.
struct Before {
  int32_t above = 0, inside = 0;

  // The search goes on among the keys of one digit; `more` of the parts' keys have higher ones.
  JAXCP_BOTH void narrow(int32_t more, int32_t still_inside) { above += more, inside = still_inside; }
  // Once the search is over: above the cut, and equal to it.
  JAXCP_BOTH Before of(const Cut& cut) const { return cut.ties > 0 ? *this : Before{above + inside, 0}; }
  JAXCP_BOTH Places places(const Cut& cut) const {
    return {above + (inside < cut.ties ? inside : cut.ties), cut.ties - inside};
  }
};

// Where a cut may lie: the wanted-th largest of the keys in low ... high, in 2^bits equal digits.
struct Range {
  uint32_t low, high;
  int32_t wanted;

  JAXCP_BOTH bool has(uint32_t key) const { return key - low <= high - low; }
  JAXCP_BOTH int shift(int bits) const {
    const int length = bit_length(high - low);
    return length > bits ? length - bits : 0;
  }
  // The cut lies among the keys of one digit; `above` keys have higher ones.
  JAXCP_BOTH void narrow(int bits, uint32_t digit, int32_t above) {
    const int wide = shift(bits);
    low += digit << wide;
    if (high - low > (1u << wide) - 1) high = low + ((1u << wide) - 1);
    wanted -= above;
  }
};

struct Found {
  uint32_t digit;
  int32_t above, inside;  // keys of higher digits, of this one
};

// The cut that keeps `wanted` of a team's more than `enough` keys, or sooner any number up to `enough`. The team's
// first range ends at its greatest key and begins at one that at least `wanted` keys reach. Each pass over the keys
// narrows it by kDigitBits bits, so their number is bounded, however alike the keys are.
template <class Team>
JAXCP_BOTH Cut find_cut(Team& team, int32_t wanted, int32_t enough) {
  Range range = team.range(wanted);
  while (range.low < range.high) {
    const int shift = range.shift(Team::kDigitBits);
    team.clear_bins();
    team.each([&](uint32_t key) { team.count_if(range.has(key), (key - range.low) >> shift); });
    const Found found = team.find(range.wanted);
    range.narrow(Team::kDigitBits, found.digit, found.above);
    if (wanted - range.wanted + found.inside <= enough) return {range.low - 1, 0};  // low > 0: some keys are below
  }
  return {range.low, range.wanted};
}

}  // namespace jaxcp::qsa

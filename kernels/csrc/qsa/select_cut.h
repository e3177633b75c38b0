// The exact top k of a row: order of scores, search for the cut, places of what is kept. Written once for the GPU and
// the host (tests/native/qsa_select_twin.cc): `Warp` and `Team` are the 32 lanes of a warp and the threads of a block
// there, and one thread that does all their work here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAXCP_BOTH __host__ __device__ __forceinline__
#else
#define JAXCP_BOTH inline
#endif

namespace jaxcp::qsa {

constexpr int32_t kAllTies = 0x7FFFFFFF;

// What a row keeps: every key above `key`, and of the keys equal to it the first `ties` in order of ids.
template <class Key>
struct Cut {
  Key key;
  int32_t ties;
};

// Larger score, larger key; the two zeros share one. NaN with a clear sign is above +inf, as in XLA's sort.
JAXCP_BOTH uint32_t order_key(uint32_t bits) {
  if (bits == 0x80000000u) bits = 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

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
    const uint32_t all_tied = warp.ballot(tied);
    const bool keep = above || (tied && warp.count_before(all_tied) < ties);
    const uint32_t kept = warp.ballot(keep);
    const int32_t place = next + warp.count_before(kept);
    next += bit_count(kept);
    ties -= bit_count(all_tied);
    return keep ? place : -1;
  }
};

// The cut among a warp's keys >= 0 (absent ones are -1) that keeps at least `wanted` of them: exactly that many, or
// sooner any number up to `enough`. Bit by bit from the first that differs; at most 31 counts.
template <int kPerLane, class Warp>
JAXCP_BOTH Cut<int32_t> warp_cut(const Warp& warp, const int32_t (&key)[kPerLane], int32_t wanted, int32_t enough) {
  const auto above = [&](int32_t bound) {
    int32_t count = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) count += key[j] > bound;
    return warp.sum(count);
  };
  int32_t most = -1;
  uint32_t least = 0xFFFFFFFFu;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    most = key[j] > most ? key[j] : most;
    least = static_cast<uint32_t>(key[j]) < least ? static_cast<uint32_t>(key[j]) : least;
  }
  most = warp.max(most), least = warp.min(least);
  if (above(-1) <= enough) return {static_cast<int32_t>(least), kAllTies};
  const int bits = bit_length(static_cast<uint32_t>(most) ^ least);
  int32_t bound = static_cast<int32_t>(least >> bits << bits);  // bits <= 31: both have a clear sign
  for (int bit = bits - 1; bit >= 0; --bit) {
    const int32_t higher = bound | 1 << bit;
    const int32_t count = above(higher - 1);
    if (count < wanted) continue;
    bound = higher;
    if (count <= enough) return {bound, kAllTies};
  }
  return {bound, wanted - above(bound)};
}

// Where a row's cut may lie: the wanted-th largest of its keys in low ... low + 2^bits - 1.
struct Range {
  static constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

  uint32_t low;
  int bits;
  int32_t wanted;

  JAXCP_BOTH int shift() const { return bits > kDigitBits ? bits - kDigitBits : 0; }
  // For keys not below the row's least: a key below `low` differs from it by 2^shift modulo 2^32 or more.
  JAXCP_BOTH bool has(uint32_t key) const { return bits >= 32 || (key - low) >> bits == 0; }
  JAXCP_BOTH uint32_t digit(uint32_t key) const { return (key - low) >> shift(); }
  // The cut lies among the keys of one digit; `above` keys of the range have higher ones.
  JAXCP_BOTH void narrow(uint32_t digit, int32_t above) {
    low += digit << shift();
    bits = shift();
    wanted -= above;
  }
};

// The cut that keeps exactly k of the n > k scores of a row. `Team` has bins of shared memory, sums and extremes.
template <class Team>
JAXCP_BOTH Cut<uint32_t> row_cut(Team& team, const uint32_t* scores, int32_t n, int32_t k) {
  uint32_t least = 0xFFFFFFFFu, most = 0;
  team.each(scores, n, [&](uint32_t key) {
    least = key < least ? key : least;
    most = key > most ? key : most;
  });
  team.extremes(least, most);
  Range range{least, bit_length(most - least), k};
  while (range.bits > 0) {
    team.clear_bins();
    team.each(scores, n, [&](uint32_t key) {
      if (range.has(key)) team.count(range.digit(key));
    });
    const auto found = team.find(range.wanted);  // digit, keys above it, keys in it
    range.narrow(found.digit, found.above);
    if (found.inside == range.wanted) return {range.low, kAllTies};
  }
  return {range.low, range.wanted};
}

}  // namespace jaxcp::qsa

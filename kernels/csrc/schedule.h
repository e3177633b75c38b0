// Order of work in one exchange call: which item is the t-th.
//
// An item is a block's worth of rows to send, or to receive and merge. Row q of the send list goes to destination
// (rank + 1 + q mod (c - 1)) mod c, so that the ranks never aim at one receiver together, and is row q div (c - 1)
// there. The first `lead` items are sends; then c - 1 sends and one receive alternate; then come the receives that are
// left. Receive j uses rows of the sends below (j + 1)(c - 1), and at least as many sends precede it: the order that
// the progress argument of protocol.h needs (tests/native/schedule_test.cc checks it for many sizes).
#pragma once

#include "protocol.h"

namespace jaxcp {

// Quotients by a divisor that is known before the launch: a multiplication instead of some hundred cycles.
//   n div d = floor(2 n m / 2^(32 + l)),  m = ceil(2^(31 + l) / d),  l = ceil(log2 d)     for n < 2^31
// (m d exceeds 2^(31 + l) by less than 2^l, and n times that excess stays below 2^(31 + l).)
struct Divider {
  uint32_t divisor, multiplier, shift;

  static constexpr Divider of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((1ull << shift) < divisor) ++shift;
    return {divisor, static_cast<uint32_t>(((1ull << (31 + shift)) + divisor - 1) / divisor), shift};
  }
  JAXCP_HD constexpr uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(2 * n) * multiplier) >> 32) >> shift;
  }
};

struct Item {
  bool receive;
  uint32_t index;  // of the item among the sends, or among the receives
};

struct Schedule {
  uint32_t peers;     // c - 1
  uint32_t sends;     // items
  uint32_t receives;  // items
  uint32_t lead;      // sends before the first receive, where there are that many
  uint32_t rounds;    // of `peers` sends and one receive, after the lead
  Divider by_round;   // items of a round

  static constexpr Schedule of(uint32_t rows, uint32_t rows_per_item, uint32_t peers, uint32_t lead) {
    const uint32_t sends = (rows * peers + rows_per_item - 1) / rows_per_item;
    lead = lead < sends ? lead : sends;
    return {
        peers, sends, (rows + rows_per_item - 1) / rows_per_item, lead, (sends - lead) / peers, Divider::of(peers + 1)};
  }

  JAXCP_HD constexpr uint32_t items() const { return sends + receives; }

  JAXCP_HD constexpr Item operator[](uint32_t t) const {
    if (t < lead) return {false, t};
    if (t >= sends + rounds) return {true, t - sends};
    const uint32_t round = by_round.quotient(t - lead);
    if (round >= rounds) return {false, t - rounds};
    const uint32_t place = t - lead - round * (peers + 1);
    return place == peers ? Item{true, round} : Item{false, t - round};
  }
};

}  // namespace jaxcp

// Order of work in one exchange call: which item is the t-th, the same on every rank.
//
// An item is a block's worth of rows to send, or to receive and merge. Row q of the send list goes to destination
// (rank + 1 + q mod (c - 1)) mod c, so that the ranks never aim at one receiver together, and is row q div (c - 1) there.
// The first `lead` items are sends; then c - 1 sends and one receive alternate; then come the receives that are left.
// Receive j uses rows of the sends below (j + 1)(c - 1), and at least as many sends precede it: the order that the
// progress argument of protocol.h needs (tests/native/test_host.cpp checks it for many sizes).
#pragma once

#include "protocol.h"

namespace jaxcp {

struct Item {
  bool receive;
  uint32_t index;  // of the item among the sends, or among the receives
};

struct Schedule {
  uint32_t peers;     // c - 1
  uint32_t sends;     // items
  uint32_t receives;  // items
  uint32_t lead;      // sends before the first receive, where there are that many

  JAXCP_HD static constexpr Schedule of(uint32_t rows, uint32_t rows_per_item, uint32_t peers, uint32_t lead) {
    const uint32_t sends = (rows * peers + rows_per_item - 1) / rows_per_item;
    return {peers, sends, (rows + rows_per_item - 1) / rows_per_item, lead < sends ? lead : sends};
  }

  JAXCP_HD constexpr uint32_t items() const { return sends + receives; }

  JAXCP_HD constexpr Item operator[](uint32_t t) const {
    if (t < lead) return {false, t};
    const uint32_t mixed = (sends - lead) / peers;  // rounds of `peers` sends and one receive
    const uint32_t past = t - lead;
    if (past < mixed * (peers + 1)) {
      const uint32_t round = past / (peers + 1), place = past % (peers + 1);
      return place == peers ? Item{true, round} : Item{false, lead + round * peers + place};
    }
    return t < sends + mixed ? Item{false, t - mixed} : Item{true, t - sends};
  }
};

}  // namespace jaxcp

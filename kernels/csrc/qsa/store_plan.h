// Which blocks of the indexer a forward finishes and where their tokens are, by integers alone: plain C++, for the
// kernel in store.cu and for tests/native/qsa_store_test.cc on the host.
#pragma once

#include <cstdint>

#include "both.h"

namespace jaxcp::qsa {

// The new tokens of one request: `count` packed rows from first_row on, at positions from `prefix` on.
struct Run {
  int32_t first_row, count, prefix, request;

  JAXCP_BOTH int32_t total() const { return prefix + count; }
  // Blocks that are complete with the new tokens and were not before are begun() ... finished() - 1.
  JAXCP_BOTH int32_t begun(int32_t ratio) const { return (prefix > 0 ? prefix : 0) / ratio; }
  JAXCP_BOTH int32_t finished(int32_t ratio) const {
    const int32_t total = this->total();
    return (total > 0 ? total : 0) / ratio;
  }
  JAXCP_BOTH int32_t blocks(int32_t ratio) const {
    const int32_t blocks = finished(ratio) - begun(ratio);
    return blocks > 0 ? blocks : 0;
  }
  // Whether the first of them has tokens from before this forward.
  JAXCP_BOTH bool straddles(int32_t ratio) const { return blocks(ratio) > 0 && prefix % ratio > 0; }
  // The packed row of the token at a position; negative for an older one.
  JAXCP_BOTH int32_t row_of(int32_t position) const { return position < prefix ? -1 : first_row + (position - prefix); }
};

// The newest position that belongs into slot `slot` of a ring of `ring` slots, once a request has `total` tokens;
// negative: none does.
JAXCP_BOTH int32_t newest_in_slot(int32_t total, int32_t slot, int32_t ring) {
  const int32_t last = total - 1, behind = (last - slot) % ring;
  return last - (behind < 0 ? behind + ring : behind);
}

// Place of position `position` of a request among all pages' `per_page` places of a layer; -1 if it has no page.
JAXCP_BOTH int64_t place_of(const int32_t* table, int32_t requests, int32_t width, int64_t pages, int32_t per_page,
                            int32_t request, int32_t position) {
  if (request < 0 || request >= requests || position < 0 || position / per_page >= width) return -1;
  const int32_t page = table[int64_t{request} * width + position / per_page];
  return page > 0 && page < pages ? int64_t{page} * per_page + position % per_page : -1;
}

}  // namespace jaxcp::qsa

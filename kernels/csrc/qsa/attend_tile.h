// The union of a tile's selections, step by step. Plain C++: the kernel in attend_lists.cu runs these steps with a
// thread per word, tests/native/qsa_attend_tile_test.cc one after the other on the host.
//
// Blocks are looked at in windows of 32 * kWindow. In a window every row marks its blocks in a bitmap; a word of the
// union is the OR of the rows' words, its number of bits says how many entries it gives, and a prefix sum where they
// go.
#pragma once

#include <cstdint>

#include "attend_params.h"

namespace jaxcp::qsa {

constexpr int kWindow = 256;  // words per row; threads of the kernel

JAXCP_BOTH uint32_t list_entry(uint32_t slot, uint32_t rows) { return slot << 8 | rows; }
JAXCP_BOTH uint32_t entry_slot(uint32_t entry) { return entry >> 8; }
JAXCP_BOTH uint32_t entry_rows(uint32_t entry) { return entry & 0xFF; }

// Place of a request's block among all blocks of a layer. An id beyond the table means its last page: never out of
// range.
JAXCP_BOTH uint32_t slot_of(const int32_t* table, int table_width, int blocks_per_page, int block) {
  const int page = block / blocks_per_page, place = block - page * blocks_per_page;
  return static_cast<uint32_t>(table[page < table_width ? page : table_width - 1]) * blocks_per_page + place;
}

// Tokens of the incomplete block of a row; 0 for padding.
JAXCP_BOTH int tail_of(int position, int ratio) { return position < 0 ? 0 : (position + 1) % ratio; }

// The rows of a tile that belong to the request of row `leader`, as bits, and the blocks that the last of them sees;
// no rows if an earlier one leads the request, or `leader` is padding.
struct Group {
  uint32_t members = 0;
  int blocks = 0;
};
JAXCP_BOTH Group group_of(const int32_t* request, const int32_t* position, int rows, int leader, int ratio) {
  Group group;
  if (position[leader] < 0) return group;
  for (int row = 0; row < rows; ++row) {
    if (position[row] < 0 || request[row] != request[leader]) continue;
    if (row < leader) return Group{};
    group.members |= 1u << row;
    const int blocks = (position[row] + 1) / ratio;
    group.blocks = blocks > group.blocks ? blocks : group.blocks;
  }
  return group;
}

// Marks block `id` of a row in its bitmap [kWindow] if it lies in the window of blocks from `first` on.
JAXCP_BOTH void mark(uint32_t* bitmap, int id, int first) {
  const int at = id - first;
  if (id < 0 || at < 0 || at >= 32 * kWindow) return;
#ifdef __CUDA_ARCH__
  atomicOr(&bitmap[at >> 5], 1u << (at & 31));
#else
  bitmap[at >> 5] |= 1u << (at & 31);
#endif
}

// Word `word` of the union of `rows` bitmaps.
JAXCP_BOTH uint32_t union_word(const uint32_t (*bitmaps)[kWindow], int rows, int word) {
  uint32_t any = 0;
  for (int row = 0; row < rows; ++row) any |= bitmaps[row][word];
  return any;
}

// Writes the entries of a word of the union in ascending order; block `first` is its bit 0. A page is looked up once.
JAXCP_BOTH void emit(const uint32_t (*bitmaps)[kWindow], int rows, int word, int first, uint32_t any,
                     const int32_t* table, int table_width, int blocks_per_page, int32_t* entries) {
  if (any == 0) return;
  int end = first;  // of the page whose slots are `base` + block
  uint32_t base = 0;
  for (; any != 0; any &= any - 1) {
#ifdef __CUDA_ARCH__
    const int bit = __ffs(any) - 1;
#else
    const int bit = __builtin_ctz(any);
#endif
    const int block = first + bit;
    if (block >= end) {
      base = slot_of(table, table_width, blocks_per_page, block) - block;
      end = block - block % blocks_per_page + blocks_per_page;
    }
    uint32_t members = 0;
    for (int row = 0; row < rows; ++row) members |= (bitmaps[row][word] >> bit & 1) << row;
    *entries++ = list_entry(base + block, members);
  }
}

// Entry of the tail of row `row`.
JAXCP_BOTH uint32_t tail_entry(const int32_t* table, int table_width, int blocks_per_page, int position, int ratio,
                               int row) {
  return list_entry(slot_of(table, table_width, blocks_per_page, (position + 1) / ratio), 1u << row);
}

// Rows of an entry that attend to its token `token`: all of a complete block, of a tail those in front of its end.
JAXCP_BOTH uint32_t rows_of_token(uint32_t entry, bool tail, int token, const int32_t* position, int ratio) {
  const uint32_t rows = entry_rows(entry);
  if (!tail || rows == 0) return rows;
#ifdef __CUDA_ARCH__
  const int row = __ffs(rows) - 1;
#else
  const int row = __builtin_ctz(rows);
#endif
  return token < tail_of(position[row], ratio) ? rows : 0;
}

}  // namespace jaxcp::qsa

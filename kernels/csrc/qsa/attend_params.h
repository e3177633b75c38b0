// Sparse grouped-query attention over the paged cache: how the kernels work, and their argument (plain C++).
//
// MATHS. A row p of a request attends to the tokens I(p) of its selected blocks and of its tail; see
// jaxcp/qsa/sparse.py, which this equals: q scaled by scale log2(e) and rounded to bf16, scores, softmax (base 2) and
// normaliser in fp32, probabilities rounded to bf16 for the values product, output bf16, LSE base 2. A row without
// tokens gives (0, -inf).
//
// COST of flash_next (24 heads on 2, dim 256) at 8192 rows and 2051 tokens a row:
//   * gathered per row, 8192 * 2051 * 2 KiB = 34 GB: 4.3 ms at some 8 TB/s of L2 (30 clocks a token, KV head and SM)
//   * arithmetic, 8192 * 2051 * 24 * 1 KiB = 413 GFLOP: 0.52 ms at 790 TFLOP/s
// So a row at a time is bound by the gather, and rows must share it. One KV head serves 12 query heads: 5 rows fill 60
// of the 64 rows of a Hopper warpgroup MMA, and what they gather once is the union of their selections.
//
// TILES. `tile_rows` neighbouring rows are a tile; a first kernel (attend_lists.cu) writes each tile's union as a list
// of 32-bit entries, (block's place in the pool) * 256 + (bit per row), complete blocks in ascending order, then an
// entry per row that has a tail. An entry means `ratio` tokens; a token is masked per row by its entry's bits, those of
// a tail also by its length. Rows of several requests in one tile are a union per request. Nothing depends on how much
// is shared: a union of rows that share nothing costs a row's gather per row and 64/60 of its arithmetic, and
// arithmetic is the smaller term.
//
// WALK. A block of threads takes one (tile, KV head, part of the list) and walks it in chunks of 64 tokens, gathered by
// 16-byte cp.async into a ring in shared memory; tokens that no row attends to are filled with zeros and never read.
//   attend_wgmma.cu  Hopper: 1 warpgroup gathers, 2 compute, each every other chunk, merged at the end. Per chunk of
//                    dim 256: 64 KiB gathered (1900 clocks of L2), 2 * 64 * 64 * 256 MACs (1024 clocks), 96 KiB of
//                    shared memory read and 64 KiB written (1280 clocks). 224 registers: O 128, scores 32, P 16.
//   attend_mma.cu    the same tiles with mma.sync, where there is no warpgroup MMA.
//   attend_rows.cu   rows that go alone, with mma.sync.
//
// FEW ROWS. Where requests have only a row or so each (decode), a tile would be a union of strangers: rows go alone
// (`tile_rows` = 1, no lists: a row's ids are its list), and each list is cut into `splits` parts, whose partials a
// last kernel merges in order. Results do not depend on timing: no atomics on data, a fixed order of sums.
//
// MEASURED on an H200: 7.7 TB/s gathered where rows share nothing, of some 8 without MMAs. Where they share all,
// MMAs, softmax and copies are not hidden behind each other as well as they could be (kernels/README.md).
//
// PRODUCTS. A layer gives its products instead of queries. Queries are normed and rotated as an item begins, or, for
// attend_wgmma.cu, by a kernel of their own for a slice of rows (heads.h); results are multiplied by the sigmoids of
// their gates as they are written. So no more than a slice's queries exist in memory, and ungated results only as
// parts.
//
// A NaN or infinity in K or V of a token that a row attends to may reach the other rows of its tile; one in a token
// that no row of the tile attends to reaches none.
#pragma once

#include <cstdint>

#include "angles.h"
#include "both.h"

namespace jaxcp::qsa {

constexpr int kTileHeads = 64;  // MMA rows of a tile: (row, head of the group)
constexpr int kMostRows = 8;    // query rows of a tile: bits of an entry's mask
constexpr int kChunk = 64;      // tokens per step of a walk
constexpr int kMostSplits = 64;
constexpr int64_t kMostSlots = int64_t{1} << 24;  // blocks of one layer: an entry has 24 bits for its place

// A layer's products with its query weights, and what makes queries of them.
struct Products {
  const void* q_gate;  // bf16 [rows, heads, 2, dim]: of each head the query, then the gate
  const void* norm;    // bf16 [dim]
  Angles angles;       // of the rows
  float eps;
};

struct AttendParams {
  const void* q;              // bf16 [rows, heads, dim]; null: made from `products`
  Products products;          // q_gate null: `q` is given, and results are not gated
  const int32_t* blocks;      // [rows, width]: ids in front, ascending, each below (position + 1) / ratio; then -1
  const int32_t* request;     // [rows], row of page_table
  const int32_t* position;    // [rows]; -1: a padding row
  const int32_t* page_table;  // [requests, table_width]
  const void* k;              // bf16 [layers, pages, page_size, kv_heads, dim]
  const void* v;              // like k
  const int32_t* layer;       // one number
  void* o;                    // bf16 [rows, heads, dim]
  float* lse;                 // [rows, heads], base 2; null: not wanted
  int32_t* scratch;           // scratch_words()
  int64_t scratch_size;       // words there are
  int64_t rows, layers, pages;
  int32_t requests, table_width, heads, kv_heads, dim, width, page_size, ratio;
  float scale_log2e;
  int32_t tile_rows;  // 1: rows go alone
  int32_t splits;     // parts that a list is cut into
  int64_t slice;      // rows at a time, which bounds the lists; a multiple of tile_rows; all rows if splits > 1

  JAXCP_BOTH int32_t group() const { return heads / kv_heads; }
  JAXCP_BOTH int32_t blocks_per_page() const { return page_size / ratio; }
  JAXCP_BOTH bool gated() const { return products.q_gate != nullptr; }
  // Whether rows are attended to in tiles that have lists; a row that goes alone needs none if its heads fill one MMA.
  JAXCP_BOTH bool has_lists() const { return tile_rows > 1 || group() > 16; }
  // A tile's list: number of complete blocks, number of tails, entries.
  JAXCP_BOTH int64_t list_words() const { return 2 + int64_t{tile_rows} * (width + 1); }
};

// Rows [first, first + count) of one launch, and where their lists and partials are.
struct Slice {
  int64_t first, count;
  int32_t tiles;
  int32_t* lists;   // [tiles, list_words]
  float* part_o;    // [splits, rows, heads, dim], fp32; splits > 1 only
  float* part_lse;  // [splits, rows, heads]
};

}  // namespace jaxcp::qsa

// Block selection of QSA: scores of every row against the compressed keys of its request, and the exact top k of them.
//
//     s(p, n) = index_dim^-1/2 sum_h max(0, <a_h(p), c_n>)     n < v(p) = floor((p + 1) / ratio)
//     ids(p) = 0 ... v - 1 if v <= k, else the k largest s, equal ones by smaller id; ascending, -1 behind
//
// Two methods, both exact and deterministic, both with products by mma.sync (select_score.cuh).
//
// Streaming (select_stream.cu), for prefill. A block keeps the index queries of 64 rows in registers and walks all
// keys of their request once. A score is compared in the epilogue with its row's threshold, the k-th best so far, and
// joins the row's list of candidates only if it beats it: keys come in order of ids, so a later equal one has lost
// already, and ties need nothing more. A list that is full (1024) is cut back to about k. Of N scores in random order
// k (1 + ln(N / k)) join; in the worst order all of them, at one cut per 450. Scores are never stored.
//
//   8192 rows, 8192 blocks, 4 heads, dim 128:  60 GFLOP; 0.10 ms at mma.sync's 610 TFLOP/s
//     keys from L2: 128 blocks x 1.8 MB = 0.24 GB; 128 rows a block would leave half the SMs idle
//     candidates: 1900 a row, 0.12 GB written; 3.4 cuts and a last one per row
//     (storing scores instead: 0.24 GB through L2 twice, and a selection that reads them four times)
//     measured on an H200: 0.435 ms; 32768 rows, 32768 blocks: 3.9 ms. Of a warp's time 55 % go to products and
//     epilogue (a step of 64 products and 190 other instructions takes 1650 clocks, two warps a scheduler: latencies of
//     shared memory, shuffles and stores, the tensor cores wait half of it), 30 % to cuts (1300 instructions each), 15
//     % to the last cuts. Warpgroup MMA would take the operands' loads and half the instructions off the warps: the
//     next step on Hopper.
//   registers a thread: 64 queries + 32 sums (or 32 keys of a cut) + ~60, of 232; shared memory: 8 stages of 64 keys,
//     138 KiB, which four producer warps fill, so warps may be 8 stages apart: one cuts, the others multiply
//   memory: 64 rows x 8 KiB = 512 KiB a block, at most 160 blocks: 80 MiB, whatever the context
//
// Stored scores (select_stored.cu), for decode and other small products, k > 512 or more than 4 heads. One kernel
// writes the scores, keys split over blocks so that every SM reads its share of them once. Another one selects
// (select_top.cu): the greatest keys of groups bound the cut from below (k groups reach the k-th greatest of them), so
// that histograms over the range that can still hold it count few keys, and a prefix count gives the ids. Nothing is
// binned by value alone and nothing is dropped: bounded passes over the row, whatever it holds.
//
//   a block per row: 2048 or 4096 groups, bins and so little more than k keys to count, at most three times
//   a cluster of eight blocks per row, for a few long rows, where one block's time is instructions of its processor:
//     1024 groups for k = 512 and the row's upper fifth in 256 bins, few so that every block can send its own to all;
//     two such passes for random scores, at most four, the keys in registers up to 65536
//   1 row of 32768 blocks: 8.4 MB of keys; 10.3 us, of which 6.2 are the selection (by one block 13.6)
//   32 rows: 268 MB, 62 us at 4.3 TB/s; 92 us, of which 10.3 are the selection (by one block each 14.6)
//   memory: rows x blocks x 4 bytes in one go up to 64 MiB, else row tiles of that (256 rows at 65536 blocks)
//
// A score is the float32 sum of exact products, so scores may differ from XLA's in the last place where sums round; the
// sum over heads and the scale are in the same order. e4m3 keys are widened to float16 (exact), as are the queries,
// which the caller rounded to e4m3.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxcp::qsa {

constexpr int kMaxIndexHeads = 8;
constexpr int kMaxStreamedHeads = 4;  // with more, queries and sums leave no registers for a cut
constexpr int kTileRows = 64;         // query rows of a block
constexpr int kCandidates = 1024;     // places in a row's list of the streaming method
constexpr int kMaxStreamedK = 512;    // leaves a list room to fill again after a cut
constexpr int kStageKeys = 64;        // keys per stage; stored rows of scores are padded to it
constexpr int64_t kStreamBytes = int64_t{kTileRows} * kCandidates * 8;  // lists of one block

enum class Method : int32_t { stored, streaming };

struct SelectParams {
  const void* index_q;        // bfloat16 [rows, heads, dim]
  const void* pool;           // [layers, pages, page_blocks, dim]: bfloat16, or e4m3 bits
  const int32_t* layer;       // one, on the device
  const int32_t* page_table;  // [requests, request_pages]
  const int32_t* request;     // [rows]
  const int32_t* position;    // [rows]; -1: no row, its ids are -1
  int32_t* ids;               // [rows, k]
  void* scratch;
  int64_t scratch_bytes;
  int32_t rows, heads, dim, k;
  int32_t layers, pages, page_blocks, requests, request_pages;
  int32_t ratio, blocks;  // blocks: bound of a row's visible blocks, within the page table
  int32_t longest;        // bound of neighbouring rows of one request
  bool e4m3;
  Method method;
};

// Why these sizes cannot run, or null.
const char* problem(const SelectParams& p);

cudaError_t launch_select(const SelectParams& p, cudaStream_t stream);
cudaError_t launch_stored(const SelectParams& p, cudaStream_t stream);
cudaError_t launch_streaming(const SelectParams& p, cudaStream_t stream);

// The selection alone: rows of given scores >= +0, `stride` (a multiple of 4) apart, of which a row at position p sees
// the first min((p + 1) / ratio, blocks).
struct ScoredRows {
  const float* scores;
  int64_t stride;
  const int32_t* position;
  int32_t* ids;  // [rows, k]
  int32_t rows, k, ratio, blocks;
};
cudaError_t launch_top_blocks(const ScoredRows& r, cudaStream_t stream);

// Loads every kernel on the current device and allows it its shared memory.
cudaError_t load_select();
cudaError_t load_stored();
cudaError_t load_top_blocks();
cudaError_t load_streaming();

int multiprocessors();  // of the current device

}  // namespace jaxcp::qsa

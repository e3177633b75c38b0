// What a forward writes into the paged cache, in place (host interface): jaxcp/qsa/update.py, which this equals but for
// the dump, which is not written. What has no place is left out, whatever the lengths on the device are.
//
//   store_kv     K and V of rows, as stored: a warp per row copies 16 bytes per lane.
//   store_index  compressed keys of the blocks that a forward finishes, and the newest raw keys into the rings:
//                    c_n = rope(norm(mean of the block's raw keys)),   sum in token order, fp32, rounded in steps
//                    (head.cuh)
//                A block whose tokens are all new is read from the forward's keys. Of each request at most one block
//                has older tokens, which wait in its ring: the warp that has the request compresses it, and then puts
//                the newest keys into the ring.
//
//   32768 rows of 2 KiB: 67 MB read and written each; 32 us at 4.2 TB/s, where two scatters of XLA take 290.
#pragma once

#include <cuda_runtime_api.h>

#include "heads.h"
#include "store_plan.h"

namespace jaxcp::qsa {

struct Pages {
  const int32_t* table;  // [requests, width]; 0: no page
  const int32_t* layer;  // one number
  int32_t requests, width, page_size;
  int64_t layers, pages;
};

struct StoreKvParams {
  const void* kv;           // [rows, 2, row_bytes]: K, then V
  const int32_t* request;   // [rows]
  const int32_t* position;  // [rows]; -1: padding
  void *k_pool, *v_pool;    // [layers, pages, page_size, row_bytes]
  Pages at;
  int64_t rows, row_bytes;  // row_bytes: a multiple of 16
};

struct StoreIndexParams {
  const void* keys;         // bf16 [rows, dim]: raw keys in packed order
  const void* weight;       // bf16 [dim]
  Angles angles;            // of the packed rows
  Angles pending;           // [segments, pairs]: of the first token of the block that each request's prefix ends in
  const int32_t* rope;      // [3, rows]
  const int32_t* runs;      // [4, segments]: first_row, count, prefix, request
  void* pool;               // [layers, pages, page_size / ratio, dim]: bf16, or e4m3 bits
  void* ring_keys;          // bf16 [layers, 1 + requests, ring, dim]
  int32_t* ring_positions;  // [layers, 1 + requests, ring, 4]
  int32_t* faults;          // [2]; stale blocks are added to the second one
  Pages at;
  int64_t rows;
  int32_t segments, dim, ratio, ring;
  float eps;
  bool e4m3;
};

// What is wrong with `params`, or null.
const char* problem(const StoreKvParams& params);
const char* problem(const StoreIndexParams& params);

cudaError_t launch_store(const StoreKvParams& params, cudaStream_t stream);
cudaError_t launch_store(const StoreIndexParams& params, cudaStream_t stream);

// Loads every kernel on the current device.
cudaError_t load_store();

}  // namespace jaxcp::qsa

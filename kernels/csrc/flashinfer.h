// FlashInfer's fused exchange kernel (0.7.4, flashinfer/comm/dcp_lse_reduce.cuh), launched over our workspaces.
//
// A second opinion on results and the peer in benchmarks. The header is the user's own installation's, compiled
// unmodified. Its waits have no end: a rank that does not come leaves the others spinning.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "protocol.h"

namespace jaxcp {

// Its workspace: [16 bytes of counters][ready flags: 2 slots, source][rows: slot, source, row][lse: slot, source, row].
//   bytes = align16(16 + 8 c) + 2 c M (dim itemsize + 4)
// The first zero_bytes() must be zero before any peer can write; it takes M from the number of bytes.
struct FlashInferLayout {
  int32_t cp;
  int32_t capacity;   // M, rows per source
  int32_t row_bytes;  // dim * itemsize

  constexpr size_t zero_bytes() const { return (16 + 8 * static_cast<size_t>(cp) + 15) / 16 * 16; }
  constexpr size_t slot_data() const { return static_cast<size_t>(cp) * capacity * row_bytes; }
  constexpr size_t slot_lse() const { return static_cast<size_t>(cp) * capacity * sizeof(float); }
  constexpr size_t lse_begin() const { return zero_bytes() + kSlots * slot_data(); }
  constexpr size_t bytes() const { return lse_begin() + kSlots * slot_lse(); }
};
// Where a block made by flashinfer_block.cc keeps FlashInferParams::workspaces: after FlashInfer's own bytes.
constexpr size_t flashinfer_table(const FlashInferLayout& layout) { return (layout.bytes() + 15) / 16 * 16; }
// 32 tokens x 16 heads, 8 ranks, 512 x 16 bit: align16(16 + 64) + 2*8*512*(1024 + 4).
static_assert(FlashInferLayout{8, 512, 1024}.bytes() == 80 + 8421376);

struct FlashInferParams {
  const void* o;               // [rows, cp, dim], contiguous, 16-byte aligned
  const float* lse;            // [rows, cp], contiguous
  void* out;                   // [rows, dim]
  uint8_t* workspace;          // this rank's
  uint8_t* const* workspaces;  // device array of cp addresses, by rank
  int32_t rank, cp, rows, capacity, dim;
  Dtype dtype;
  Base base;
};

// Why a call cannot run, or null.
inline const char* problem(const FlashInferParams& p) {
  if (p.cp < 1 || p.cp > kMaxRanks) return "cp must be 1 .. 64";
  if (p.rank < 0 || p.rank >= p.cp) return "rank must be 0 .. cp - 1";
  if (p.rows < 1 || p.rows > p.capacity) return "rows must be 1 .. capacity";
  if (p.dtype != Dtype::bfloat16 && p.dtype != Dtype::float16) return "dtype must be bfloat16 or float16";
  if (p.dim < 1 || p.dim % 8 != 0) return "dim must be a multiple of 8 (rows of whole 16-byte units)";
  if (reinterpret_cast<uintptr_t>(p.o) % 16 != 0) return "o must be 16-byte aligned";
  if (p.workspace == nullptr || reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0 || p.workspaces == nullptr) {
    return "workspaces must be 16-byte aligned";
  }
  return nullptr;
}

// Loads every variant of the kernel on the current device; see load_exchange().
cudaError_t load_flashinfer();

// Launches one call of one rank, cooperatively. grid_cap > 0 limits the blocks.
cudaError_t launch_flashinfer(const FlashInferParams& params, int grid_cap, cudaStream_t stream);

// Readies the workspace of one rank, in stream order. No peer may be in a call.
cudaError_t reset_flashinfer(uint8_t* workspace, const FlashInferLayout& layout, cudaStream_t stream);

}  // namespace jaxcp

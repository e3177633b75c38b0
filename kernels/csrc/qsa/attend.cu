// One call of sparse attention: checks, scratch, slices, choice of the kernel.
#include "attend.h"
#include "heads.h"

namespace jaxcp::qsa {
namespace {

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;  // of a launch

// Words of the queries of a slice, where a kernel of their own makes them.
int64_t query_words(const AttendParams& p) {
  return p.gated() && p.has_lists() ? (p.rows < p.slice ? p.rows : p.slice) * p.heads * p.dim / 2 : 0;
}
int64_t tiles_of(const AttendParams& p, int64_t rows) { return (rows + p.tile_rows - 1) / p.tile_rows; }

int64_t list_words(const AttendParams& p) {
  const int64_t rows = p.rows < p.slice ? p.rows : p.slice;
  const int64_t words = p.has_lists() ? tiles_of(p, rows) * p.list_words() : 0;
  return (words + 3) / 4 * 4;  // partials behind them are read 16 bytes at a time
}
int64_t part_words(const AttendParams& p) {
  return p.splits == 1 ? 0 : int64_t{p.splits} * p.rows * p.heads * (p.dim + 1);
}

bool has_warpgroup_mma() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

// Queries of a slice's rows, into the front of scratch.
PrepareParams queries_of(const AttendParams& p, const Slice& slice) {
  const int64_t head = 2 * int64_t{p.dim}, row = head * p.heads;
  const auto* from = static_cast<const uint16_t*>(p.products.q_gate) + slice.first * row;
  Angles angles = p.products.angles;
  angles.cos += slice.first * angles.pairs, angles.sin += slice.first * angles.pairs;
  const Heads heads{from, p.products.norm, p.scratch, row, head, row / 2, p.heads, p.dim, /*in_steps=*/false};
  return {{heads}, 1, angles, p.products.eps, slice.count};
}

cudaError_t launch_slice(AttendParams p, const Slice& slice, cudaStream_t stream) {
  if (!p.has_lists()) return launch_rows(p, slice, stream);
  if (cudaError_t error = launch_lists(p, slice, stream); error != cudaSuccess) return error;
  if (!has_warpgroup_mma()) return launch_portable(p, slice, stream);
  if (p.gated()) {
    if (cudaError_t error = launch_prepare(queries_of(p, slice), stream); error != cudaSuccess) return error;
    p.q = reinterpret_cast<const uint16_t*>(p.scratch) - slice.first * p.heads * p.dim;  // rows count from the first
  }
  return launch_hopper(p, slice, stream);
}

}  // namespace

const char* problem(const AttendParams& p) {
  if (p.rows < 0 || p.width < 1 || p.requests < 1 || p.table_width < 1) return "sizes must be positive";
  if (p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads != 0)
    return "heads must be a multiple of kv_heads";
  if (p.dim != 64 && p.dim != 128 && p.dim != 256) return "dim must be 64, 128 or 256";
  if (p.ratio < 1 || (p.ratio & (p.ratio - 1)) != 0) return "ratio must be a power of two";
  if (p.page_size % p.ratio != 0) return "page_size must be a multiple of ratio";
  if (p.tile_rows < 1 || p.tile_rows > kMostRows || p.tile_rows * p.group() > kTileHeads) {
    return "tile_rows must be in 1 ... 8 and fill at most 64 rows with the heads of a group";
  }
  if (p.splits < 1 || p.splits > kMostSplits) return "splits must be in 1 ... 64";
  if (p.slice < 1 || p.slice % p.tile_rows != 0) return "slice must be a positive multiple of tile_rows";
  if (p.splits > 1 && p.slice < p.rows) return "lists are cut only where one slice holds all rows";
  if (p.pages * p.blocks_per_page() > kMostSlots) return "a layer must have at most 2^24 blocks";
  if (p.rows * p.heads * (p.dim / 8) >= int64_t{1} << 32) return "queries must be below 64 GiB";
  if (p.pages * p.page_size * p.kv_heads * (p.dim / 8) >= int64_t{1} << 32)
    return "a layer's keys must be below 64 GiB";
  if (tiles_of(p, p.slice) * p.kv_heads * p.splits > kMostBlocks || p.rows * p.heads > kMostBlocks)
    return "too many rows";
  if (p.scratch_size < scratch_words(p)) return "scratch is too small";
  if ((p.q == nullptr) != p.gated()) return "either queries or products must be given";
  return p.gated() ? problem(queries_of(p, Slice{0, p.rows < p.slice ? p.rows : p.slice})) : nullptr;
}

int64_t scratch_words(const AttendParams& p) { return query_words(p) + list_words(p) + part_words(p); }

cudaError_t launch_attend(const AttendParams& p, cudaStream_t stream) {
  for (int64_t first = 0; first < p.rows; first += p.slice) {
    Slice slice{};
    slice.first = first;
    slice.count = p.rows - first < p.slice ? p.rows - first : p.slice;
    slice.tiles = static_cast<int32_t>(tiles_of(p, slice.count));
    slice.lists = p.scratch + query_words(p);
    slice.part_o = reinterpret_cast<float*>(slice.lists + list_words(p));
    slice.part_lse = slice.part_o + int64_t{p.splits} * p.rows * p.heads * p.dim;
    cudaError_t error = launch_slice(p, slice, stream);
    if (error == cudaSuccess && p.splits > 1) error = launch_merge(p, slice, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t load_attend() {
  for (const auto load : {load_lists, load_portable, load_hopper, load_rows}) {
    if (cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jaxcp::qsa

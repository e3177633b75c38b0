// The exchange's protocol: what lies in a workspace, what travels, and why it is correct.
//
// Plain C++17: the device kernel (exchange.cuh), its host twin and the tests compile these same lines.
//
// MATHS. c ranks attend with all H heads over their own keys and hold partials (o [tokens, H, dim], lse [tokens, H]).
// Rank r keeps h = ceil(H / c) heads: row i of token t on rank r is head r h + i. With l_i the LSEs of the c sources of
// a row (NaN and +inf count as -inf, "no key seen"), b the base, and sums in source order 0 .. c-1 on every rank:
//     m = max_i l_i, or 0 if all are -inf     w_i = b^(l_i - m)     s = sum_i w_i
//     out = sum_i o_i w_i / s                 lse = m + log_b s
// w_i = 0 selects 0 instead of multiplying; s = 0 gives (0, -inf). jaxcp/lse.py defines this; it is repeated here.
//
// TRANSPORT. A sender stores its rows straight into the receivers' workspaces, 16 bytes per thread: no fence, no flag,
// no acknowledgement. A word that no one has written holds kBlank, and a receiver polls the very words that it is about
// to use until none of them is blank. So every 32-bit word carries its own readiness, and nothing is assumed about the
// order or the tearing of stores beyond the atomicity of an aligned 32-bit word: lines, 16-byte units and their halves
// may arrive in any order (case "tearing"). kBlank is a NaN in float32, and a pair of NaNs in either 16-bit format,
// that arithmetic does not produce; a sender that meets it in its input sends other NaNs instead, so no number and no
// zero's sign is ever changed (case "table"). LSEs are sanitised before they are sent and are never blank. The receiver
// writes kBlank back into each word that it consumed. The self contribution never travels.
//
// SLOTS. Call n uses slot n mod 2. Claim: when p writes a word into slot n mod 2 at q in call n + 2, that word is blank
// at q, and q has finished reading it. Proof: p's kernel n + 2 starts after p's kernel n + 1 ended (stream order). That
// one ended because every word q owed it in call n + 1 had arrived. q stored those in kernel n + 1, which started after
// q's kernel n had ended, with all its reads of the slot and all its blanks written. Each arrow is a kernel boundary
// (which orders at system scope, and where the fence's cost is hidden) or a value read from its store, so the blank
// precedes p's store in the word's coherence order. The evidence so far is one device with simulated ranks, long runs
// included, and some thousand calls between two H200s over NVLink; no soak has run over a link. One slot is not
// enough: p may store for n + 1 while q still reads n. tests/test_protocol_model.py runs through all interleavings: one
// slot fails, two slots hold, and two slots fail if blanks are left out, if a rank waits for no one, or if the slot
// does not alternate at the wrap. The proof needs every rank to wait for every peer in every call. A row without a head
// (r h + i >= H) therefore travels as its LSE alone, -inf, and its receiver writes (0, -inf) once all have come.
//
// CALL NUMBER. 32 bits in device memory, because a captured launch is replayed without its host. It chooses the slot
// and names the call in a status, and never travels, so its wrap (2^32 is even) and a repeated value are harmless
// (case "call_numbers"). One 64-bit word holds {call, tickets}. Each block adds one ticket per work item it begins;
// whoever draws the last one knows that every block has read the call number, and writes {call + 1, 0}. No block
// publishes a number that another has yet to read, and there is no barrier over the grid.
//
// FORWARD PROGRESS without a cooperative launch. Sends never wait. Each rank takes its items in an order (schedule.h)
// in which receive j comes after all sends that feed receive j of any peer. Of all blocked receives of all ranks take
// the one with the lowest j: in each peer's order, only sends and receives below j precede the sends that it waits for,
// so these are begun, and end. The first item of a block is its index, so that inputs load while the call number is on
// its way: this needs blocks to start in index order, or all blocks of a launch to start some time; launches are capped
// at what the device holds at once, so that either suffices. Later items are drawn by ticket.
//
// BOUNDED WAITS. A wait that outlasts timeout_ns (of the kernel: each row's, from its first look at the clock; of the
// twin, which waits for one row after another: all of a call's, from the call's begin) marks the workspace dead,
// reports {peer, row, call} in host-mapped memory, fills its rows with NaN and goes on; the other waits of the rank see
// the mark and end likewise. A call on a dead workspace sends nothing, fills its output with NaN and returns at once,
// until a collective reset has blanked all workspaces (cases "absent" and "late"). Ranks that call with different row
// counts, or skip a call, end here too.
//
// THE PROGRAM'S MESH. A program names ranks by its own mesh. If that orders the devices otherwise than the exchange's did,
// heads would go to the wrong ranks, silently. So a call brings its device's place in the program's mesh, a value that
// exists on the device only, and compares it with the place in the exchange's. A rank that differs takes part, so that
// nobody waits for it, but its output is NaN and it reports kForeign instead of a peer.
//
// The cases are those of tests/native, which tests/test_kernel_ranks.py runs on one GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#ifdef __CUDACC__
#define JAXCP_HD __host__ __device__
#else
#define JAXCP_HD
#endif

namespace jaxcp {

constexpr int kMaxRanks = 64;
constexpr int kSlots = 2;
constexpr int kUnitBytes = 16;                 // what one thread moves at a time; a row is a whole number of them
constexpr int kMaxRows = 1 << 24;              // per rank and call: Status has 24 bits for a row
constexpr int kMaxSends = 1 << 26;             // rows to send per call: a warp each, and thread numbers have 31 bits
constexpr int64_t kMaxSourceBytes = 1ll << 32;  // of M rows: the distance between two sources has 32 bits
constexpr uint32_t kBlank = 0xFFFFFFFFu;       // a word that no one has written
constexpr uint32_t kBlankInput = 0x7FFF7FFFu;  // what is sent for an input word equal to kBlank: NaN in every dtype too
constexpr int kForeign = 127;                  // Expiry::peer of a program whose mesh is not the exchange's
constexpr uint32_t kVersion = 1;               // of layout and transport; part of the fingerprint that ranks agree on

enum class Dtype : int32_t { bfloat16 = 0, float16 = 1, float32 = 2 };
enum class Base : int32_t { two = 0, e = 1 };

JAXCP_HD constexpr int itemsize(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }
JAXCP_HD constexpr int per_unit(Dtype dtype) { return kUnitBytes / itemsize(dtype); }

// An input word as it travels.
JAXCP_HD constexpr uint32_t outgoing(uint32_t word) { return word == kBlank ? kBlankInput : word; }

// First bytes of a workspace. Zero when the workspace is blank.
struct alignas(128) Control {
  uint64_t call_and_tickets;  // call number << 32 | tickets drawn in the running call
  uint32_t dead;              // 1 after an expired wait, until reset
};
static_assert(sizeof(Control) == 128);

JAXCP_HD constexpr uint32_t call_of(uint64_t call_and_tickets) { return static_cast<uint32_t>(call_and_tickets >> 32); }
JAXCP_HD constexpr uint32_t ticket_of(uint64_t call_and_tickets) { return static_cast<uint32_t>(call_and_tickets); }
JAXCP_HD constexpr uint64_t first_of_call(uint32_t call) { return static_cast<uint64_t>(call) << 32; }

// Where things lie in a workspace: [Control][lse: slot, source, row][data: slot, source, row, row_bytes].
//   bytes = 128 + align128(8 (c - 1) M) + 2 (c - 1) M dim itemsize      M = tokens heads_per_rank (rows per source)
// A workspace is blank when its Control is zero and all other bytes are 0xFF.
struct Layout {
  int32_t cp;         // ranks
  int32_t capacity;   // M
  int32_t row_bytes;  // dim * itemsize, a multiple of 16

  // Sources other than the owner, numbered 0 .. c-2 in rank order.
  JAXCP_HD static constexpr int index(int source, int owner) { return source - (source > owner ? 1 : 0); }

  JAXCP_HD constexpr size_t rows() const { return static_cast<size_t>(cp - 1) * static_cast<size_t>(capacity); }
  JAXCP_HD constexpr size_t row(uint32_t call, int source, int owner, int row) const {
    return (call & 1u) * rows() + static_cast<size_t>(index(source, owner)) * static_cast<size_t>(capacity) +
           static_cast<size_t>(row);
  }
  JAXCP_HD constexpr size_t data_begin() const {
    return sizeof(Control) + (kSlots * rows() * sizeof(float) + 127) / 128 * 128;
  }
  // Byte offsets in the workspace of rank `owner`.
  JAXCP_HD constexpr size_t lse(uint32_t call, int source, int owner, int r) const {
    return sizeof(Control) + row(call, source, owner, r) * sizeof(float);
  }
  JAXCP_HD constexpr size_t data(uint32_t call, int source, int owner, int r) const {
    return data_begin() + row(call, source, owner, r) * static_cast<size_t>(row_bytes);
  }
  JAXCP_HD constexpr size_t bytes() const { return data_begin() + kSlots * rows() * static_cast<size_t>(row_bytes); }
};
// 32 tokens x 16 heads, 8 ranks, 512 x 16 bit: 128 + 2*7*512*4 + 2*7*512*1024.
static_assert(Layout{8, 512, 1024}.bytes() == 128 + 28672 + 7340032);
// The same in float32: 128 + 2*7*512*4 + 2*7*512*2048.
static_assert(Layout{8, 512, 512 * itemsize(Dtype::float32)}.bytes() == 128 + 28672 + 14680064);
// 8 tokens x 2 heads, 4 ranks, 128 x 16 bit: 128 + 2*3*16*4 + 2*3*16*256.
static_assert(Layout{4, 16, 256}.bytes() == 128 + 384 + 24576);
// 1 row, 2 ranks: 8 bytes of LSE occupy a whole 128-byte line.
static_assert(Layout{2, 1, 16}.bytes() == 128 + 128 + 32);

// The one word of host-mapped memory through which a rank reports its first expired wait: 0, or who was waited for. One
// aligned 64-bit store, so a host that polls it sees all of a report or nothing.
struct Expiry {
  bool expired;
  int32_t peer;   // rank whose data did not come, or kForeign
  int32_t row;    // row (token * heads_per_rank + i) that was waited for; of kForeign the place that the program gave
  uint32_t call;  // call number

  JAXCP_HD constexpr uint64_t packed() const {
    return 1ull << 63 | static_cast<uint64_t>(peer) << 56 | static_cast<uint64_t>(row) << 32 | call;
  }
  JAXCP_HD static constexpr Expiry unpacked(uint64_t word) {
    return {(word >> 63) != 0, static_cast<int32_t>(word >> 56 & 0x7F), static_cast<int32_t>(word >> 32 & 0xFFFFFF),
            static_cast<uint32_t>(word)};
  }
};
static_assert(Expiry::unpacked(Expiry{true, 63, kMaxRows - 1, 0xFFFFFFFEu}.packed()).row == kMaxRows - 1);

// One call of one rank.
struct ExchangeParams {
  const void* o;     // [tokens, heads, dim], unit stride in dim; row starts on 16 bytes
  const float* lse;  // [tokens, heads]
  void* out;         // [tokens, heads_per_rank, dim], contiguous, 16-byte aligned
  float* out_lse;    // [tokens, heads_per_rank], contiguous; or null
  int64_t o_token_stride, o_head_stride, lse_token_stride, lse_head_stride;  // elements
  int32_t tokens, heads, heads_per_rank, dim;
  Dtype dtype;
  Base base;  // of lse and out_lse
  int32_t rank, cp;
  int32_t capacity;  // M, the same on all ranks
  int32_t grid_cap;  // most blocks to launch; 0: what the device holds at once
  uint64_t timeout_ns;
  const uint32_t* place;           // in device memory: the device's place in the program's mesh; null: not compared
  uint32_t own_place;              // and in the exchange's
  uint64_t* status;                // device address of the host-mapped word, see Expiry
  uint8_t* workspaces[kMaxRanks];  // by rank, as this device addresses them; 128-byte aligned

  JAXCP_HD constexpr Layout layout() const { return {cp, capacity, dim * itemsize(dtype)}; }
  JAXCP_HD constexpr int rows() const { return tokens * heads_per_rank; }
  // Head that row `row` of rank `owner` holds; >= heads: none.
  JAXCP_HD constexpr int head(int owner, int row) const { return owner * heads_per_rank + row % heads_per_rank; }
};

// Why a call cannot run, or null. Host side, before any launch; needs no device.
inline const char* problem(const ExchangeParams& p) {
  const auto misaligned = [](const void* pointer, size_t to) { return reinterpret_cast<uintptr_t>(pointer) % to != 0; };
  if (p.cp < 2 || p.cp > kMaxRanks) return "cp must be 2 .. 64";
  if (p.rank < 0 || p.rank >= p.cp) return "rank must be 0 .. cp - 1";
  if (p.tokens < 1 || p.heads < 1 || p.dim < 1) return "tokens, heads and dim must be at least 1";
  if (p.dtype < Dtype::bfloat16 || p.dtype > Dtype::float32) return "dtype must be bfloat16, float16 or float32";
  if (p.dim % per_unit(p.dtype) != 0) return "dim must be a multiple of 8, or 4 in float32 (rows of 16-byte units)";
  if (p.heads_per_rank != (p.heads + p.cp - 1) / p.cp) return "heads_per_rank must be ceil(heads / cp)";
  if (static_cast<int64_t>(p.tokens) * p.heads_per_rank > p.capacity) return "more rows than the workspace holds";
  if (p.capacity >= kMaxRows) return "capacity must be below 2^24 rows";
  if (int64_t{p.capacity} * (p.cp - 1) >= kMaxSends) return "capacity x (cp - 1) must be below 2^26 rows to send";
  if (int64_t{p.dim} * itemsize(p.dtype) * p.capacity >= kMaxSourceBytes)
    return "capacity must be below 4 GiB per source";
  for (const int64_t stride : {p.o_token_stride, p.o_head_stride, p.lse_token_stride, p.lse_head_stride}) {
    if (stride < 0 || stride >= int64_t{1} << 31) return "strides must be 0 .. 2^31 - 1 elements";
  }
  if (p.o_token_stride % per_unit(p.dtype) != 0 || p.o_head_stride % per_unit(p.dtype) != 0)
    return "strides of o must be multiples of 16 bytes";
  if (misaligned(p.o, 16) || misaligned(p.out, 16)) return "o and out must be 16-byte aligned";
  if (misaligned(p.lse, 4) || misaligned(p.out_lse, 4)) return "lse must be 4-byte aligned";
  if (p.timeout_ns == 0 || p.status == nullptr) return "a time-out and a status word are required";
  for (int rank = 0; rank < p.cp; ++rank) {
    if (p.workspaces[rank] == nullptr || misaligned(p.workspaces[rank], 128))
      return "workspaces must be 128-byte aligned";
  }
  return nullptr;
}

}  // namespace jaxcp

// The exchange as one kernel: sends this rank's partials to the ranks that keep their heads, merges what it keeps.
//
// The protocol and its correctness are protocol.h's. Here: how work maps to threads.
// A group of lanes, the power of two next to a row's 16-byte units and at most a warp, owns one row: of the send list, or of
// the receive list. A lane keeps kUnits units of every source in flight, so a receive costs one memory latency after
// the last word arrived. Nothing passes between warps but the block's next item.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "access.cuh"
#include "protocol.h"
#include "schedule.h"

namespace jaxcp::device {

constexpr int kThreads = 128;
constexpr unsigned kWarp = 0xFFFFFFFFu;
constexpr int kPollsPerCheck = 64;  // about 25 us between looks at the clock

struct BFloat16 {
  __device__ static float2 unpack(uint32_t w) { return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)}; }
  __device__ static uint32_t pack(float x, float y) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

struct Float16 {
  __device__ static float2 unpack(uint32_t w) { return __half22float2(reinterpret_cast<const __half2&>(w)); }
  __device__ static uint32_t pack(float x, float y) {
    const __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(v);
  }
};

__device__ __forceinline__ bool any_blank(uint4 v) {
  return v.x == kBlank || v.y == kBlank || v.z == kBlank || v.w == kBlank;
}
__device__ __forceinline__ uint4 outgoing(uint4 v) {
  return {jaxcp::outgoing(v.x), jaxcp::outgoing(v.y), jaxcp::outgoing(v.z), jaxcp::outgoing(v.w)};
}
__device__ __forceinline__ uint4 splat(uint32_t w) { return {w, w, w, w}; }
__device__ __forceinline__ float sanitized(float lse) { return lse < INFINITY ? lse : -INFINITY; }

// Lanes that own a row: the power of two next to its units, at most a warp.
__host__ __device__ constexpr int lanes_per_row(int dim) {
  int lanes = 1;
  while (lanes < 32 && lanes < dim / 8) lanes *= 2;
  return lanes;
}

// What a block knows of the running call once its first ticket is there.
struct Call {
  uint32_t number;
  uint32_t next;  // item after the current one
  bool dead;
};

// Hides where a pointer comes from, so that addresses derived from it are computed where they are used: hoisted out of the
// polling loop they would take two registers each, and with them half of the resident blocks.
template <class T>
__device__ __forceinline__ T* fresh(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// kPeers: peers in flight. kMany: there are more, in batches. kUnits: units of a row in flight per lane and source.
template <class Float, int kPeers, bool kMany, int kUnits>
class Exchange {
 public:
  // Blocks per multiprocessor to leave registers for: 4 are taken per peer and unit in flight.
  static constexpr int kBlocks = kMany ? 4 : kPeers * kUnits == 1 ? 8 : kPeers * kUnits <= 3 ? 6 : kPeers * kUnits <= 7 ? 5 : 4;

  __device__ explicit Exchange(const ExchangeParams& params)
      : p(params),
        layout(params.layout()),
        units(params.dim / 8),
        group(lanes_per_row(params.dim)),
        lane(threadIdx.x & (group - 1)),
        control(reinterpret_cast<Control*>(params.workspaces[params.rank])),
        log2_base(params.base == Base::two ? 1.f : 1.4426950408889634f) {}

  __device__ void run() {
    const uint32_t rows_per_item = kThreads / group;
    const Schedule schedule = Schedule::of(p.rows(), rows_per_item, p.cp - 1, gridDim.x);
    uint32_t item = blockIdx.x;
    for (int turn = 0; item < schedule.items(); turn ^= 1) {
      const Draw draw = drawn();
      const Item work = schedule[item];
      const uint32_t q = work.index * rows_per_item + threadIdx.x / group;
      if (work.receive) {
        Incoming row(*this, q);  // loads are on their way while the ticket is
        const Call call = begin(draw, schedule, turn);
        row.receive(*this, call);
        item = call.next;
      } else {
        Outgoing row(*this, q);
        const Call call = begin(draw, schedule, turn);
        if (!call.dead) row.send(*this, call.number);
        item = call.next;
      }
    }
  }

 private:
  const ExchangeParams& p;
  const Layout layout;
  const int units;  // of 16 bytes per row
  const int group;  // lanes per row
  const int lane;   // in the group
  Control* const control;
  const float log2_base;

  // Thread 0 draws a ticket; both accesses are in flight until begin() uses them.
  struct Draw {
    uint64_t word;
    uint32_t dead;
  };
  __device__ Draw drawn() const {
    if (threadIdx.x != 0) return {};
    const uint64_t word = add_device(&control->call_and_tickets, 1);
    return {word, load_device_word(&control->dead)};
  }

  // Gives the block its call number and next item. The last ticket of a call ends the call for this device.
  __device__ Call begin(const Draw& draw, const Schedule& schedule, int turn) const {
    __shared__ Call calls[2];  // alternating, so that one barrier per item is enough
    if (threadIdx.x == 0) {
      const uint32_t call = call_of(draw.word), ticket = ticket_of(draw.word);
      if (ticket == schedule.items() - 1) store_system_long(&control->call_and_tickets, first_of_call(call + 1));
      calls[turn] = {call, gridDim.x + ticket, draw.dead != 0};
    }
    __syncthreads();
    return calls[turn];
  }

  // One row of this rank's input, as the rank that keeps its head numbers rows.
  struct Input {
    const char* data = nullptr;  // null: no such head
    float lse = -INFINITY;
    uint4 v[kUnits];

    __device__ Input() {}
    __device__ Input(const Exchange& x, int owner, int row) {
      const int token = row / x.p.heads_per_rank, head = x.p.head(owner, row);
      if (head >= x.p.heads) return;
      data = static_cast<const char*>(x.p.o) + 2 * (token * x.p.o_token_stride + head * x.p.o_head_stride);
      lse = sanitized(__ldg(x.p.lse + token * x.p.lse_token_stride + head * x.p.lse_head_stride));
      load(x, 0);
    }
    __device__ void load(const Exchange& x, int begin) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) v[u] = load_input(data + x.offset(begin, u));
    }
  };

  // Byte offset in a row of this lane's u-th unit of the chunk that begins at unit `begin`. Past the row's end the last
  // unit is loaded again; nothing is stored there.
  __device__ uint32_t offset(int begin, int u) const { return min(begin + u * group + lane, units - 1) * kUnitBytes; }
  __device__ bool inside(int begin, int u) const { return begin + u * group + lane < units; }

  // A row of the send list.
  struct Outgoing {
    int owner = -1, row = 0;  // owner -1: past the end of the list
    Input input;

    __device__ Outgoing(const Exchange& x, uint32_t q) {
      const uint32_t peers = x.p.cp - 1;
      if (q >= peers * x.p.rows()) return;
      row = q / peers;
      owner = x.p.rank + 1 + q % peers;
      if (owner >= x.p.cp) owner -= x.p.cp;
      input = Input(x, owner, row);
    }

    __device__ void send(const Exchange& x, uint32_t call) {
      if (owner < 0) return;
      uint8_t* const workspace = x.p.workspaces[owner];
      if (x.lane == 0) store_system_word(workspace + x.layout.lse(call, x.p.rank, owner, row), __float_as_uint(input.lse));
      if (!input.data) return;
      uint8_t* const data = workspace + x.layout.data(call, x.p.rank, owner, row);
      for (int begin = 0; begin < x.units; begin += kUnits * x.group) {
        if (begin > 0) input.load(x, begin);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (x.inside(begin, u)) store_system(data + x.offset(begin, u), outgoing(input.v[u]));
        }
      }
    }
  };

  // A row that this rank keeps. Peers are numbered 0 .. c - 2 in rank order; self stands before peer number `rank`.
  struct Incoming {
    int row;  // -1: past the end of the list
    Input self;
    uint32_t call = 0;
    char *data, *lse;                  // of peer 0
    uint32_t data_step, lse_step;      // to the next peer
    float shift = 0, sum = 0;          // over all sources: max of LSEs, sum of base^(LSE - max)
    float peer_lse[kPeers];            // of the batch in flight
    uint4 v[kPeers][kUnits];

    __device__ Incoming(const Exchange& x, uint32_t q) : row(static_cast<int>(q) < x.p.rows() ? static_cast<int>(q) : -1) {
      if (row >= 0) self = Input(x, x.p.rank, row);
    }

    __device__ void receive(const Exchange& x, const Call& running) {
      const int first = x.p.rank == 0 ? 1 : 0;  // the rank that is peer 0
      char* const workspace = reinterpret_cast<char*>(x.control);
      call = running.number;
      data = workspace + x.layout.data(call, first, x.p.rank, max(row, 0));
      lse = workspace + x.layout.lse(call, first, x.p.rank, max(row, 0));
      data_step = x.p.capacity * x.layout.row_bytes;
      lse_step = x.p.capacity * sizeof(float);
      const bool merged = row < 0 || (!running.dead && (self.data ? merge(x) : none(x)));
      if (!__all_sync(kWarp, merged)) {  // the lanes of a row agree, so that no row is half filled
        if (row >= 0) fill(x, 0x7FFF7FFFu, NAN);
      } else if (row >= 0) {
        for (int i = x.lane; i < x.p.cp - 1; i += x.group) store_system_word(lse + uint64_t{lse_step} * i, kBlank);
      }
    }

    __device__ bool merge(const Exchange& x) {
      if (kMany && !norm_of_many(x)) return false;
      for (int begin = 0; begin < x.units; begin += kUnits * x.group) {
        if (begin > 0) self.load(x, begin);
        float acc[kUnits][8] = {};
        for (int first = 0; first < x.p.cp; first += kPeers) {  // up to cp: self may stand behind all peers
          if (!poll<true>(x, first, begin)) return false;
          if (!kMany) norm(x);
          accumulate(x, acc, first);
          blank(x, first, begin);
          if (!kMany) break;
        }
        write(x, acc, begin);
      }
      if (x.p.out_lse && x.lane == 0) x.p.out_lse[row] = sum > 0 ? shift + log2f(sum) / x.log2_base : -INFINITY;
      return true;
    }

    // A row without a head: all LSEs must come, because the reuse of slots hangs on that; there is no data.
    __device__ bool none(const Exchange& x) {
      for (int first = 0; first < x.p.cp - 1; first += kPeers) {
        if (!poll<false>(x, first, 0)) return false;
      }
      fill(x, 0, -INFINITY);
      return true;
    }

    // Waits until no word of peers first .. first + kPeers - 1 is blank. False: the wait expired, or the rank is dead.
    template <bool kData>
    __device__ bool poll(const Exchange& x, int first, int begin) {
      const int peers = x.p.cp - 1 - first;
      uint32_t pending = peers >= kPeers ? (1u << kPeers) - 1 : (1u << max(peers, 0)) - 1;
#pragma unroll
      for (int i = 0; i < kPeers; ++i) peer_lse[i] = -INFINITY;
      uint64_t since = 0;
      for (int polls = 1; pending != 0; ++polls) {
        const char* const data_now = fresh(data) + uint64_t{data_step} * first;
        const char* const lse_now = fresh(lse) + uint64_t{lse_step} * first;
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          if (!(pending >> i & 1)) continue;
          peer_lse[i] = __uint_as_float(load_system_word(lse_now + uint64_t{lse_step} * i));
#pragma unroll
          for (int u = 0; kData && u < kUnits; ++u) v[i][u] = load_system(data_now + uint64_t{data_step} * i + x.offset(begin, u));
        }
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          bool wait = __float_as_uint(peer_lse[i]) == kBlank;
#pragma unroll
          for (int u = 0; kData && u < kUnits; ++u) wait |= any_blank(v[i][u]);
          if (!wait) pending &= ~(1u << i);
        }
        if (polls % kPollsPerCheck == 0 && pending != 0 && expired(x, since, first + __ffs(pending) - 1)) return false;
      }
      return true;
    }

    // Whether to stop waiting for peer `i`: time is up, or another wait of this rank has found that it is.
    __device__ bool expired(const Exchange& x, uint64_t& since, int i) const {
      const uint64_t now = nanoseconds();
      if (since == 0) since = now;
      if (load_device_word(&x.control->dead) != 0) return true;
      if (now - since < x.p.timeout_ns) return false;
      const Expiry expiry{true, i + (i >= x.p.rank ? 1 : 0), row, call};
      if (swap_device(&x.control->dead, 1) == 0) store_system_long(x.p.status, expiry.packed());
      return true;
    }

    __device__ float power(const Exchange& x, float lse) const { return exp2f((lse - shift) * x.log2_base); }

    __device__ float highest(float m) const {
#pragma unroll
      for (int i = 0; i < kPeers; ++i) m = fmaxf(m, peer_lse[i]);
      return m;
    }
    // Adds the batch's powers to `sum`, self at its place.
    __device__ void add(const Exchange& x, int first) {
#pragma unroll
      for (int i = 0; i < kPeers + !kMany; ++i) {
        if (first + i == x.p.rank) sum += power(x, self.lse);
        if (i < kPeers) sum += power(x, peer_lse[i]);
      }
    }
    __device__ void norm(const Exchange& x) {
      shift = highest(self.lse);
      if (shift == -INFINITY) shift = 0;
      sum = 0;
      add(x, 0);
    }
    __device__ bool norm_of_many(const Exchange& x) {
      shift = self.lse;
      for (int first = 0; first < x.p.cp; first += kPeers) {
        if (!poll<false>(x, first, 0)) return false;
        shift = highest(shift);
      }
      if (shift == -INFINITY) shift = 0;
      for (int first = 0; first < x.p.cp; first += kPeers) {
        poll<false>(x, first, 0);  // all have come
        add(x, first);
      }
      return true;
    }

    __device__ void accumulate(const Exchange& x, float (&acc)[kUnits][8], int first) const {
      const float inverse = sum > 0 ? 1 / sum : 0.f;
#pragma unroll
      for (int i = 0; i < kPeers + !kMany; ++i) {
        if (first + i == x.p.rank) add_weighted(acc, self.v, power(x, self.lse) * inverse);
        if (i < kPeers) add_weighted(acc, v[i], power(x, peer_lse[i]) * inverse);
      }
    }
    __device__ static void add_weighted(float (&acc)[kUnits][8], const uint4 (&v)[kUnits], float weight) {
      if (!(weight > 0)) return;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t words[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = Float::unpack(words[i]);
          acc[u][2 * i] = fmaf(weight, pair.x, acc[u][2 * i]);
          acc[u][2 * i + 1] = fmaf(weight, pair.y, acc[u][2 * i + 1]);
        }
      }
    }

    // Blanks this lane's units of the batch: the same thread read them.
    __device__ void blank(const Exchange& x, int first, int begin) const {
      char* const data_now = fresh(data) + uint64_t{data_step} * first;
#pragma unroll
      for (int i = 0; i < kPeers; ++i) {
        if (first + i >= x.p.cp - 1) continue;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (x.inside(begin, u)) store_system(data_now + uint64_t{data_step} * i + x.offset(begin, u), splat(kBlank));
        }
      }
    }

    __device__ char* output(const Exchange& x) const { return static_cast<char*>(x.p.out) + int64_t{row} * x.layout.row_bytes; }
    __device__ void write(const Exchange& x, const float (&acc)[kUnits][8], int begin) const {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float* a = acc[u];
        const uint4 w = {Float::pack(a[0], a[1]), Float::pack(a[2], a[3]), Float::pack(a[4], a[5]), Float::pack(a[6], a[7])};
        if (x.inside(begin, u)) *reinterpret_cast<uint4*>(output(x) + x.offset(begin, u)) = w;
      }
    }
    __device__ void fill(const Exchange& x, uint32_t word, float merged_lse) const {
      for (int unit = x.lane; unit < x.units; unit += x.group) {
        *reinterpret_cast<uint4*>(output(x) + unit * kUnitBytes) = splat(word);
      }
      if (x.p.out_lse && x.lane == 0) x.p.out_lse[row] = merged_lse;
    }
  };
};

template <class Variant>
__global__ void __launch_bounds__(kThreads, Variant::kBlocks) exchange_kernel(const __grid_constant__ ExchangeParams params) {
  Variant(params).run();
}

template <class T>
struct Type {
  using type = T;
};

// Calls visit(Type<Exchange<...>>) with the variant for a group of cp ranks and rows of dim elements. What is in flight
// follows cp and dim: registers that a call does not use cost occupancy. Groups beyond 8 are correct, not tuned.
template <class Visit>
auto with_variant(Dtype dtype, int cp, int dim, Visit visit) {
  const auto with = [&](auto number) {
    using Float = typename decltype(number)::type;
    const bool wide = dim > 256;  // more than one unit per lane
    if (cp == 2) return wide ? visit(Type<Exchange<Float, 1, false, 2>>()) : visit(Type<Exchange<Float, 1, false, 1>>());
    if (cp <= 4) return wide ? visit(Type<Exchange<Float, 3, false, 2>>()) : visit(Type<Exchange<Float, 3, false, 1>>());
    if (cp <= 8) return wide ? visit(Type<Exchange<Float, 7, false, 2>>()) : visit(Type<Exchange<Float, 7, false, 1>>());
    return visit(Type<Exchange<Float, 7, true, 1>>());
  };
  return dtype == Dtype::bfloat16 ? with(Type<BFloat16>()) : with(Type<Float16>());
}

}  // namespace jaxcp::device

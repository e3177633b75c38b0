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

__device__ __forceinline__ bool blank(uint4 v) {
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

// Scale of the merge: weights are exp2((lse - shift) * log2_base) * inverse.
struct Norm {
  float shift, sum, inverse;
};

// kSources: sources in flight. kMany: there are more, in batches. kUnits: units of a row in flight per lane and source.
template <class Float, int kSources, bool kMany, int kUnits>
class Exchange {
 public:
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
      const uint64_t ticket = threadIdx.x == 0 ? add_device(&control->call_and_tickets, 1) : 0;
      const Item work = schedule[item];
      const uint32_t q = work.index * rows_per_item + threadIdx.x / group;
      if (work.receive) {
        const Call call = begin(ticket, schedule, turn);
        receive(q, call);
        item = call.next;
      } else {
        const Outgoing row(*this, q);  // its loads are on their way while the ticket is
        const Call call = begin(ticket, schedule, turn);
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

  // Gives the block its call number and next item. The last ticket of a call ends the call for this device.
  __device__ Call begin(uint64_t ticket, const Schedule& schedule, int turn) const {
    __shared__ Call calls[2];  // alternating, so that one barrier per item is enough
    if (threadIdx.x == 0) {
      const uint32_t drawn = ticket_of(ticket);
      if (drawn == schedule.items() - 1) store_system_long(&control->call_and_tickets, first_of_call(call_of(ticket) + 1));
      calls[turn] = {call_of(ticket), gridDim.x + drawn, load_device_word(&control->dead) != 0};
    }
    __syncthreads();
    return calls[turn];
  }

  __device__ const char* input(int row, int owner) const {
    const int64_t at = row / p.heads_per_rank * p.o_token_stride + int64_t{p.head(owner, row)} * p.o_head_stride;
    return static_cast<const char*>(p.o) + at * 2;
  }
  __device__ float input_lse(int row, int owner) const {
    const int head = p.head(owner, row);
    if (head >= p.heads) return -INFINITY;
    return sanitized(__ldg(p.lse + row / p.heads_per_rank * p.lse_token_stride + head * p.lse_head_stride));
  }

  // One row of the send list: constructed when its loads start, sent when the call number is known.
  struct Outgoing {
    int row = -1, owner = 0;  // row -1: past the end of the list
    bool has_head = false;
    float lse = 0;
    uint4 v[kUnits];

    __device__ Outgoing(const Exchange& x, uint32_t q) {
      const uint32_t peers = x.p.cp - 1;
      if (q >= peers * x.p.rows()) return;
      row = q / peers;
      owner = x.p.rank + 1 + q % peers;
      if (owner >= x.p.cp) owner -= x.p.cp;
      has_head = x.p.head(owner, row) < x.p.heads;
      lse = x.input_lse(row, owner);
      if (has_head) load(x, 0);
    }

    __device__ void load(const Exchange& x, int first) {
      const char* from = x.input(row, owner);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * x.group + x.lane;
        if (unit < x.units) v[u] = load_input(from + unit * kUnitBytes);
      }
    }

    __device__ void send(const Exchange& x, uint32_t call) const {
      if (row < 0) return;
      uint8_t* to = x.p.workspaces[owner];
      if (x.lane == 0) store_system_word(to + x.layout.lse(call, x.p.rank, owner, row), __float_as_uint(lse));
      if (!has_head) return;
      to += x.layout.data(call, x.p.rank, owner, row);
      Outgoing now = *this;
      for (int first = 0;;) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const int unit = first + u * x.group + x.lane;
          if (unit < x.units) store_system(to + unit * kUnitBytes, outgoing(now.v[u]));
        }
        first += kUnits * x.group;
        if (first >= x.units) return;
        now.load(x, first);
      }
    }
  };

  // Sources first .. first + kSources - 1 of one row: their LSEs, and this lane's units from `unit` on.
  struct Batch {
    float lse[kSources];
    uint4 v[kSources][kUnits];
  };

  // Addresses of a row of source s: the workspace's, or the input's for the self contribution.
  __device__ const char* source_data(int s, int row, uint32_t call) const {
    return s == p.rank ? input(row, s)
                       : reinterpret_cast<const char*>(control) + layout.data(call, s, p.rank, row);
  }
  __device__ const uint8_t* source_lse(int s, int row, uint32_t call) const {
    return reinterpret_cast<const uint8_t*>(control) + layout.lse(call, s, p.rank, row);
  }

  // Waits until no word of the batch is blank. False: the wait expired, or the workspace is dead.
  template <bool kData>
  __device__ bool poll(Batch& b, int first, int unit, int row, uint32_t call) const {
    uint32_t pending = 0;  // bit s: source first + s
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (first + s >= p.cp) continue;
      pending |= 1u << s;
      if (first + s == p.rank) b.lse[s] = input_lse(row, p.rank);
    }
    uint64_t since = 0;
    for (int polls = 1;; ++polls) {
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (!(pending >> s & 1)) continue;
        if (first + s != p.rank) b.lse[s] = __uint_as_float(load_system_word(source_lse(first + s, row, call)));
        if (kData) load(b.v[s], source_data(first + s, row, call), unit);
      }
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        const bool wait = first + s != p.rank && (__float_as_uint(b.lse[s]) == kBlank || (kData && any_blank(b.v[s], unit)));
        if (!wait) pending &= ~(1u << s);
      }
      if (pending == 0) return true;
      if (polls % kPollsPerCheck == 0 && expired(since, first + __ffs(pending) - 1, row, call)) return false;
    }
  }

  __device__ void load(uint4 (&v)[kUnits], const char* from, int unit) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (unit + u * group < units) v[u] = load_system(from + (unit + u * group) * kUnitBytes);
    }
  }
  __device__ bool any_blank(const uint4 (&v)[kUnits], int unit) const {
    bool any = false;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) any |= unit + u * group < units && blank(v[u]);
    return any;
  }

  // Whether to stop waiting for `peer`: time is up, or another wait of this rank has found that it is.
  __device__ bool expired(uint64_t& since, int peer, int row, uint32_t call) const {
    const uint64_t now = nanoseconds();
    if (since == 0) since = now;
    if (load_device_word(&control->dead) != 0) return true;
    if (now - since < p.timeout_ns) return false;
    if (swap_device(&control->dead, 1) == 0) store_system_long(p.status, Expiry{true, peer, row, call}.packed());
    return true;
  }

  __device__ float weight(float lse, const Norm& n) const {
    return exp2f((lse - n.shift) * log2_base) * n.inverse;
  }
  __device__ float shift(const Batch& b, int first, float m) const {
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (first + s < p.cp) m = fmaxf(m, b.lse[s]);
    }
    return m;
  }
  __device__ void sum(Norm& n, const Batch& b, int first) const {
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (first + s < p.cp) n.sum += exp2f((b.lse[s] - n.shift) * log2_base);
    }
  }
  __device__ Norm norm_from(float m) const { return {m == -INFINITY ? 0.f : m, 0.f, 0.f}; }
  __device__ void close(Norm& n) const { n.inverse = n.sum > 0 ? 1 / n.sum : 0.f; }

  // Norm over batches: waits for all LSEs, then sums them in source order.
  __device__ bool norm_of_many(Norm& n, int row, uint32_t call) const {
    Batch b;
    float m = -INFINITY;
    for (int first = 0; first < p.cp; first += kSources) {
      if (!poll<false>(b, first, 0, row, call)) return false;
      m = shift(b, first, m);
    }
    n = norm_from(m);
    for (int first = 0; first < p.cp; first += kSources) {
      if (!poll<false>(b, first, 0, row, call)) return false;
      sum(n, b, first);
    }
    close(n);
    return true;
  }

  __device__ void accumulate(float (&acc)[kUnits][8], const Batch& b, const Norm& n, int first) const {
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (first + s >= p.cp) continue;
      const float w = weight(b.lse[s], n);
      if (!(w > 0)) continue;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t words[4] = {b.v[s][u].x, b.v[s][u].y, b.v[s][u].z, b.v[s][u].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = Float::unpack(words[i]);
          acc[u][2 * i] = fmaf(w, x.x, acc[u][2 * i]);
          acc[u][2 * i + 1] = fmaf(w, x.y, acc[u][2 * i + 1]);
        }
      }
    }
  }

  __device__ char* output(int row) const {
    return static_cast<char*>(p.out) + int64_t{row} * layout.row_bytes;
  }
  __device__ void write(const float (&acc)[kUnits][8], int unit, int row) const {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const float* a = acc[u];
      const uint4 v = {Float::pack(a[0], a[1]), Float::pack(a[2], a[3]), Float::pack(a[4], a[5]), Float::pack(a[6], a[7])};
      if (unit + u * group < units) *reinterpret_cast<uint4*>(output(row) + (unit + u * group) * kUnitBytes) = v;
    }
  }

  // Blanks this lane's units of all sources: the same thread read them.
  __device__ void blank_units(int first, int unit, int row, uint32_t call) const {
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
      if (first + s >= p.cp || first + s == p.rank) continue;
      char* at = const_cast<char*>(source_data(first + s, row, call));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (unit + u * group < units) store_system(at + (unit + u * group) * kUnitBytes, splat(kBlank));
      }
    }
  }
  // Blanks a row's LSEs once all lanes of the group have read them.
  __device__ void blank_lses(int row, uint32_t call) const {
    __syncwarp();
    if (row < 0) return;
    for (int s = lane; s < p.cp; s += group) {
      if (s != p.rank) store_system_word(const_cast<uint8_t*>(source_lse(s, row, call)), kBlank);
    }
  }

  __device__ bool merge(int row, uint32_t call) const {
    Norm n;
    if (kMany && !norm_of_many(n, row, call)) return false;
    const bool has_head = p.head(p.rank, row) < p.heads;
    for (int begin = 0; begin < units; begin += kUnits * group) {
      const int unit = has_head ? begin + lane : units;  // a row without a head has LSEs only
      float acc[kUnits][8] = {};
      for (int first = 0; first < p.cp; first += kSources) {
        Batch b;
        if (!poll<true>(b, first, unit, row, call)) return false;
        if (!kMany) {
          n = norm_from(shift(b, first, -INFINITY));
          sum(n, b, first);
          close(n);
        }
        accumulate(acc, b, n, first);
        blank_units(first, unit, row, call);
      }
      write(acc, begin + lane, row);
    }
    if (p.out_lse && lane == 0) p.out_lse[row] = n.sum > 0 ? n.shift + log2f(n.sum) / log2_base : -INFINITY;
    return true;
  }

  __device__ void fill_nan(int row) const {
    for (int unit = lane; unit < units; unit += group) {
      *reinterpret_cast<uint4*>(output(row) + unit * kUnitBytes) = splat(0x7FFF7FFFu);
    }
    if (p.out_lse && lane == 0) p.out_lse[row] = NAN;
  }

  __device__ void receive(uint32_t q, const Call& call) const {
    const int row = q < static_cast<uint32_t>(p.rows()) ? static_cast<int>(q) : -1;
    const bool merged = row < 0 || (!call.dead && merge(row, call.number));
    if (!__all_sync(kWarp, merged)) {  // the lanes of a row agree, so that no row is half filled
      if (row >= 0) fill_nan(row);
      return;
    }
    blank_lses(row, call.number);
  }
};

template <class Float, int kSources, bool kMany, int kUnits>
__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ ExchangeParams params) {
  Exchange<Float, kSources, kMany, kUnits>(params).run();
}

}  // namespace jaxcp::device

// The exchange as one kernel: sends this rank's partials to the ranks that keep their heads, merges what it keeps.
//
// The protocol and its correctness are protocol.h's. Here: how work maps to threads.
// A group of lanes owns one row of the send list or of the receive list (plan.h). A lane keeps kUnits units of every
// source in flight, so a receive costs one memory latency after the last word arrived. Nothing passes between warps but
// the block's next item.
#pragma once

#include "access.cuh"
#include "plan.h"
#include "words.cuh"

namespace jaxcp::device {

constexpr unsigned kWarp = 0xFFFFFFFFu;
constexpr int kPollsPerCheck = 64;  // about 25 us between looks at the clock

// What a block knows of the running call.
enum class State : uint32_t { alive, dead, foreign };
struct Call {
  uint32_t number;
  State state;
};

// Hide where a value comes from, so that what is derived from it is computed where it is used. Addresses hoisted out of
// the polling loop would take two registers each, and with them half of the resident blocks; a test hoisted to a load
// would wait for it there.
template <class T>
__device__ __forceinline__ T* fresh(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ uint32_t fresh(uint32_t word) {
  asm volatile("" : "+r"(word));
  return word;
}

// Float: format of the rows (words.cuh). kSources: ranks whose rows are in flight. kUnits: units in flight per lane and
// source. kGeneral: more ranks or longer rows than that, in batches of ranks and chunks of rows; otherwise all loops
// over them are gone at compile time.
template <class Float, int kSources, int kUnits, bool kGeneral>
class Exchange {
 public:
  // Warps per multiprocessor to leave registers for: 4 are taken per source and unit in flight.
  static constexpr int kInFlight = kSources * kUnits;
  static constexpr int kWarps = kGeneral || kInFlight > 4 ? 16 : kInFlight > 2 ? 24 : 32;
  static constexpr int kBlocks = kWarps * 32 / kThreads;
  static constexpr int kPerWord = Float::kPerWord, kPerUnit = 4 * kPerWord;  // numbers

  __device__ Exchange(const Plan& plan, const ExchangeParams& params)
      : plan(plan),
        p(params),
        lane(threadIdx.x & (lanes() - 1)),
        control(reinterpret_cast<Control*>(params.workspaces[params.rank])),
        log2_base(params.base == Base::two ? 1.f : 1.4426950408889634f),
        log_base_of_two(params.base == Base::two ? 1.f : 0.6931471805599453f) {}

  __device__ void run() {
    const Opening opening = open();
    Call call;
    uint32_t item = blockIdx.x;
    for (int turn = 0; item < plan.schedule.items(); ++turn) {
      const Item work = plan.schedule[item];
      const uint32_t q = (work.index * kThreads + threadIdx.x) >> group_shift();
      uint32_t ticket;
      if (work.receive) {
        Incoming row(*this, q);
        if (turn == 0) call = begin(opening);  // the row's loads are on their way
        ticket = draw();
        row.receive(*this, call);
      } else {
        Outgoing row(*this, q);
        if (turn == 0) call = begin(opening);
        ticket = draw();
        if (call.state != State::dead) row.send(*this, call.number);
      }
      item = next(call, ticket, turn);
    }
  }

 private:
  const Plan& plan;
  const ExchangeParams& p;
  const uint32_t lane;  // in the group
  Control* const control;
  const float log2_base, log_base_of_two;

  // Thread 0 reads the call number. The ticket that it draws next is in the same word, so coherence alone keeps the
  // read from returning the number that the last ticket leaves behind.
  struct Opening {
    uint64_t word;
    uint32_t dead, place;
  };
  __device__ Opening open() const {
    if (threadIdx.x != 0) return {};
    return {load_device_long(&control->call_and_tickets), load_device_word(&control->dead),
            p.place ? __ldg(p.place) : p.own_place};
  }
  __device__ Call begin(const Opening& opening) const {
    __shared__ Call call;
    if (threadIdx.x == 0) {
      const bool foreign = fresh(opening.place) != p.own_place;
      call = {call_of(opening.word), fresh(opening.dead) != 0 ? State::dead : foreign ? State::foreign : State::alive};
      if (call.state == State::foreign)
        store_system_long(p.status, Expiry{true, kForeign, static_cast<int>(opening.place), call.number}.packed());
    }
    __syncthreads();
    return call;
  }
  // Thread 0 draws a ticket; it is on its way until next() uses it.
  __device__ uint32_t draw() const {
    return threadIdx.x == 0 ? ticket_of(add_device(&control->call_and_tickets, 1)) : 0;
  }

  // The block's next item. The last ticket of a call ends the call for this device.
  __device__ uint32_t next(const Call& call, uint32_t ticket, int turn) const {
    __shared__ uint32_t items[2];  // alternating, so that one barrier is enough
    const bool more = plan.schedule.items() > gridDim.x;
    if (threadIdx.x == 0) {
      if (ticket == plan.schedule.items() - 1)
        store_system_long(&control->call_and_tickets, first_of_call(call.number + 1));
      items[turn & 1] = gridDim.x + ticket;
    }
    if (more) __syncthreads();
    return more ? items[turn & 1] : plan.schedule.items();
  }

  // Number of rank s among this rank's peers.
  __device__ uint32_t peer(uint32_t s) const { return s - (s > plan.rank); }

  // One row of this rank's input, as the rank that keeps its head numbers rows.
  struct Input {
    const char* data = nullptr;  // null: no such head
    float lse = -INFINITY;       // as it was found: to sanitise it here would be to wait for it here

    __device__ Input() {}
    __device__ Input(const Exchange& x, uint32_t owner, uint32_t row) {
      const uint32_t token = x.plan.by_heads.quotient(row), head = row + (owner - token) * x.plan.by_heads.divisor;
      if (head >= x.plan.heads) return;
      data = static_cast<const char*>(x.p.o) +
             kUnitBytes * (uint64_t{x.plan.o_token} * token + uint64_t{x.plan.o_head} * head);
      lse = __ldg(x.p.lse + (uint64_t{x.plan.lse_token} * token + uint64_t{x.plan.lse_head} * head));
    }
    __device__ const char* unit(const Exchange& x, uint32_t begin, int u) const { return data + x.offset(begin, u); }
  };

  // Lanes that own a row. More than one unit per lane: a whole warp.
  __device__ uint32_t group_shift() const { return kUnits > 1 ? 5 : plan.group_shift; }
  __device__ uint32_t lanes() const { return 1u << group_shift(); }
  __device__ uint32_t chunk() const { return kUnits << group_shift(); }

  // This lane's u-th unit of the chunk that begins at unit `begin`: whether it lies in the row, and its byte offset.
  // Past the row's end the last unit is loaded again, but neither stored nor waited for: its owner may have blanked it
  // already.
  __device__ bool inside(uint32_t begin, int u) const {
    return (!kGeneral && u < kUnits - 1) || begin + (u << group_shift()) + lane < plan.units;
  }
  __device__ uint32_t offset(uint32_t begin, int u) const {
    const uint32_t unit = begin + (u << group_shift()) + lane;
    return (!kGeneral && u < kUnits - 1 ? unit : min(unit, plan.units - 1)) * kUnitBytes;
  }

  // Bytes from the start of a workspace to what peer number `index` of its owner sends in a call.
  __device__ uint64_t data_at(uint32_t call, uint32_t index, uint32_t row) const {
    return plan.data_begin + (call & 1) * plan.data_slot + uint64_t{plan.data_step} * index +
           uint64_t{plan.row_bytes} * row;
  }
  __device__ uint64_t lse_at(uint32_t call, uint32_t index, uint32_t row) const {
    return sizeof(Control) + (call & 1) * plan.lse_slot + uint64_t{plan.lse_step} * index + row * sizeof(float);
  }

  // A row of the send list.
  struct Outgoing {
    uint32_t owner, row;
    Input input;
    bool exists;
    uint4 v[kUnits];

    __device__ Outgoing(const Exchange& x, uint32_t q) {
      const uint32_t peers = x.plan.by_peers.divisor;
      row = x.plan.by_peers.quotient(q);
      exists = row < x.plan.rows;
      if (!exists) return;
      owner = x.plan.rank + 1 + q - row * peers;
      if (owner > peers) owner -= peers + 1;
      input = Input(x, owner, row);
      if (input.data) load(x, 0);
    }
    __device__ void load(const Exchange& x, uint32_t begin) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) v[u] = load_input(input.data + x.offset(begin, u));
    }
    __device__ void store(const Exchange& x, uint8_t* to, uint32_t begin) const {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (x.inside(begin, u)) store_system(to + x.offset(begin, u), outgoing(v[u]));
      }
    }

    __device__ void send(const Exchange& x, uint32_t call) {
      if (!exists) return;
      uint8_t* const workspace = x.p.workspaces[owner];
      const uint32_t index = x.plan.rank - (x.plan.rank > owner);  // among the owner's peers
      if (input.data) {
        uint8_t* const to = workspace + x.data_at(call, index, row);
        store(x, to, 0);
        for (uint32_t begin = x.chunk(); kGeneral && begin < x.plan.units; begin += x.chunk()) {
          load(x, begin);
          store(x, to, begin);
        }
      }
      if (x.lane == 0) store_system_word(workspace + x.lse_at(call, index, row), __float_as_uint(sanitized(input.lse)));
    }
  };

  // A row that this rank keeps. Source s of the batch in flight is rank first + s, self among them.
  struct Incoming {
    uint32_t row;
    bool exists;
    Input self;
    uint32_t call = 0;
    char *data, *lse;          // where the first peer's row lies in the workspace
    float shift = 0, sum = 0;  // over all sources: max of LSEs, sum of base^(LSE - max)
    float l[kSources];
    uint4 v[kSources][kUnits];

    __device__ Incoming(const Exchange& x, uint32_t q) : row(q), exists(q < x.plan.rows) {
      if (!exists) return;
      self = Input(x, x.plan.rank, row);
      if (self.data) load_self(x, 0, 0);
    }
    __device__ void load_self(const Exchange& x, uint32_t first, uint32_t begin) {
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
          load_input_if(first + s == x.plan.rank, v[s][u], self.data + x.offset(begin, u));
      }
    }

    __device__ void receive(const Exchange& x, const Call& running) {
      char* const workspace = reinterpret_cast<char*>(x.control);
      call = running.number;
      data = workspace + x.data_at(call, 0, row);
      lse = workspace + x.lse_at(call, 0, row);
      self.lse = sanitized(self.lse);
      const bool merged = !exists || (running.state != State::dead && (self.data ? merge(x) : none(x)));
      if (!__all_sync(kWarp, merged)) {  // the lanes of a row agree, so that no row is half filled
        if (exists) fill(x, kBlankInput, NAN);
      } else if (exists) {
#pragma unroll 1
        for (uint32_t i = x.lane; i < x.plan.by_peers.divisor; i += x.lanes()) {
          store_system_word(lse + uint64_t{x.plan.lse_step} * i, kBlank);
        }
        if (running.state == State::foreign) fill(x, kBlankInput, NAN);
      }
    }

    __device__ bool merge(const Exchange& x) {
      if (kGeneral && !norm_of_all(x)) return false;
      for (uint32_t begin = 0; begin == 0 || (kGeneral && begin < x.plan.units); begin += x.chunk()) {
        float acc[kUnits][kPerUnit] = {};
        for (uint32_t first = 0; first == 0 || (kGeneral && first <= x.plan.by_peers.divisor); first += kSources) {
          if (begin > 0 || first > 0) load_self(x, first, begin);
          if (!poll<true>(x, first, begin)) return false;
          if (!kGeneral) norm(x);
          accumulate(x, acc);
          blank(x, first, begin);
        }
        write(x, acc, begin);
      }
      if (x.p.out_lse && x.lane == 0) x.p.out_lse[row] = sum > 0 ? shift + __log2f(sum) * x.log_base_of_two : -INFINITY;
      return true;
    }

    // A row without a head: all LSEs must come, because the reuse of slots hangs on that; there is no data.
    __device__ bool none(const Exchange& x) {
      for (uint32_t first = 0; first == 0 || (kGeneral && first <= x.plan.by_peers.divisor); first += kSources) {
        if (!poll<false>(x, first, 0)) return false;
      }
      fill(x, 0, -INFINITY);
      return true;
    }

    // Waits until no word of the batch is blank. False: the wait expired, or the rank is dead.
    // All lanes of a row poll an LSE that one of them blanks in receive(). That is right because it does so after the
    // vote there, and a lane votes only after its own load has returned a value that is not blank.
    template <bool kData>
    __device__ bool poll(const Exchange& x, uint32_t first, uint32_t begin) {
      uint32_t pending = 0;  // bit s: source s
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        l[s] = first + s == x.plan.rank ? self.lse : -INFINITY;
        if (first + s <= x.plan.by_peers.divisor && first + s != x.plan.rank) pending |= 1u << s;
      }
      uint64_t since = 0;
      for (int polls = 1; pending != 0; ++polls) {
        const char *const data_now = fresh(data), *const lse_now = fresh(lse);
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
          if (!(pending >> s & 1)) continue;
#pragma unroll
          for (int u = 0; kData && u < kUnits; ++u) {
            v[s][u] = load_system(data_now + uint64_t{x.plan.data_step} * x.peer(first + s) + x.offset(begin, u));
          }
          l[s] = __uint_as_float(load_system_word(lse_now + uint64_t{x.plan.lse_step} * x.peer(first + s)));
        }
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
          bool wait = __float_as_uint(l[s]) == kBlank;
#pragma unroll
          for (int u = 0; kData && u < kUnits; ++u) wait |= x.inside(begin, u) && any_blank(v[s][u]);
          if (!wait) pending &= ~(1u << s);
        }
        if (polls % kPollsPerCheck == 0 && pending != 0 && expired(x, since, first + __ffs(pending) - 1)) return false;
      }
      return true;
    }

    // Whether to stop waiting for `peer`: time is up, or another wait of this rank has found that it is.
    __device__ bool expired(const Exchange& x, uint64_t& since, uint32_t peer) const {
      const uint64_t now = nanoseconds();
      if (since == 0) since = now;
      if (load_device_word(&x.control->dead) != 0) return true;
      if (now - since < x.p.timeout_ns) return false;
      if (swap_device(&x.control->dead, 1) == 0)
        store_system_long(x.p.status, Expiry{true, static_cast<int>(peer), static_cast<int>(row), call}.packed());
      return true;
    }

    __device__ float power(const Exchange& x, float of_lse) const {
      return power_of_two((of_lse - shift) * x.log2_base);
    }
    __device__ void raise_shift() {
#pragma unroll
      for (int s = 0; s < kSources; ++s) shift = fmaxf(shift, l[s]);
    }
    __device__ void add_powers(const Exchange& x) {
#pragma unroll
      for (int s = 0; s < kSources; ++s) sum += power(x, l[s]);
    }
    __device__ void norm(const Exchange& x) {
      shift = -INFINITY;
      raise_shift();
      if (shift == -INFINITY) shift = 0;
      sum = 0;
      add_powers(x);
    }
    __device__ bool norm_of_all(const Exchange& x) {
      shift = -INFINITY;
      for (uint32_t first = 0; first <= x.plan.by_peers.divisor; first += kSources) {
        if (!poll<false>(x, first, 0)) return false;
        raise_shift();
      }
      if (shift == -INFINITY) shift = 0;
      for (uint32_t first = 0; first <= x.plan.by_peers.divisor; first += kSources) {
        poll<false>(x, first, 0);  // all have come
        add_powers(x);
      }
      return true;
    }

    __device__ void accumulate(const Exchange& x, float (&acc)[kUnits][kPerUnit]) const {
      const float inverse = sum > 0 ? __fdividef(1, sum) : 0.f;
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        const float weight = power(x, l[s]) * inverse;
        if (!(weight > 0)) continue;  // select: an empty shard may hold anything
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const uint32_t words[4] = {v[s][u].x, v[s][u].y, v[s][u].z, v[s][u].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) Float::add(weight, words[i], acc[u] + kPerWord * i);
        }
      }
    }

    // Blanks this lane's units of the batch: the same thread read them.
    __device__ void blank(const Exchange& x, uint32_t first, uint32_t begin) const {
      char* const data_now = fresh(data);
#pragma unroll
      for (int s = 0; s < kSources; ++s) {
        if (first + s > x.plan.by_peers.divisor || first + s == x.plan.rank) continue;
        char* const at = data_now + uint64_t{x.plan.data_step} * x.peer(first + s);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (x.inside(begin, u)) store_system(at + x.offset(begin, u), splat(kBlank));
        }
      }
    }

    __device__ char* output(const Exchange& x) const {
      return static_cast<char*>(x.p.out) + uint64_t{x.plan.row_bytes} * row;
    }
    __device__ void write(const Exchange& x, const float (&acc)[kUnits][kPerUnit], uint32_t begin) const {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float* a = acc[u];
        const uint4 w = {Float::pack(a), Float::pack(a + kPerWord), Float::pack(a + 2 * kPerWord),
                         Float::pack(a + 3 * kPerWord)};
        if (x.inside(begin, u)) *reinterpret_cast<uint4*>(output(x) + x.offset(begin, u)) = w;
      }
    }
    __device__ void fill(const Exchange& x, uint32_t word, float merged_lse) const {
#pragma unroll 1  // rare: not worth the instructions
      for (uint32_t unit = x.lane; unit < x.plan.units; unit += x.lanes()) {
        *reinterpret_cast<uint4*>(output(x) + unit * kUnitBytes) = splat(word);
      }
      if (x.p.out_lse && x.lane == 0) x.p.out_lse[row] = merged_lse;
    }
  };
};

template <class Variant>
__global__ void __launch_bounds__(kThreads, Variant::kBlocks)
    exchange_kernel(const __grid_constant__ Plan plan, const __grid_constant__ ExchangeParams params) {
  Variant(plan, params).run();
}

template <class T>
struct Type {
  using type = T;
};

// Calls visit(Type<Exchange<...>>) with the variant for a group of cp ranks and rows of row_bytes. What is in flight
// follows cp and row_bytes: registers that a call does not use cost occupancy.
template <class Visit>
auto with_variant(Dtype dtype, int cp, int row_bytes, Visit visit) {
  const auto with = [&](auto number) {
    using Float = typename decltype(number)::type;
    if (cp > 8 || row_bytes > 64 * kUnitBytes) return visit(Type<Exchange<Float, 8, 1, true>>());
    const bool wide = row_bytes > 32 * kUnitBytes;  // more than one unit per lane
    if (cp == 2)
      return wide ? visit(Type<Exchange<Float, 2, 2, false>>()) : visit(Type<Exchange<Float, 2, 1, false>>());
    if (cp <= 4)
      return wide ? visit(Type<Exchange<Float, 4, 2, false>>()) : visit(Type<Exchange<Float, 4, 1, false>>());
    return wide ? visit(Type<Exchange<Float, 8, 2, false>>()) : visit(Type<Exchange<Float, 8, 1, false>>());
  };
  if (dtype == Dtype::float32) return with(Type<Float32>());
  return dtype == Dtype::bfloat16 ? with(Type<BFloat16>()) : with(Type<Float16>());
}

}  // namespace jaxcp::device

// The host twin of the exchange kernel: one rank's call on one thread, over the same protocol.h and schedule.h.
//
// Ranks are threads of a process or processes of a host; a workspace is ordinary or POSIX shared memory. What the kernel
// does with 16-byte system-scope accesses is done here with relaxed 8-byte atomics: words carry their own readiness, so no
// order between them is assumed. The kernel boundary of the slot argument is the fence at a call's begin and end. Waits
// yield, because there may be more ranks than cores.
#pragma once

#include <sched.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "protocol.h"
#include "schedule.h"

namespace jaxcp::twin {

constexpr uint32_t kRowsPerItem = 4;
constexpr uint32_t kLead = 8;  // items; small, so that tests alternate sends and receives
constexpr int kSpinsPerYield = 64;

inline float widen(uint16_t bits, Dtype dtype) {
  if (dtype == Dtype::bfloat16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1F, mantissa = bits & 0x3FF;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -magnitude : magnitude;
}

// Round to nearest, ties to even.
inline uint16_t narrow(float value, Dtype dtype) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (dtype == Dtype::bfloat16) {
    if (std::isnan(value)) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (std::isnan(value)) return 0x7FFF;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7C00u;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  const uint32_t rebased = (bits & 0x7FFFFFFFu) - (112u << 23);
  return sign | static_cast<uint16_t>((rebased + 0xFFFu + (rebased >> 13 & 1u)) >> 13);
}

// Number j of a row.
inline float load(const uint8_t* row, int j, Dtype dtype) {
  if (dtype == Dtype::float32) {
    float value;
    std::memcpy(&value, row + 4 * j, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row + 2 * j, 2);
  return widen(bits, dtype);
}
inline void store(uint8_t* row, int j, float value, Dtype dtype) {
  if (dtype == Dtype::float32) {
    std::memcpy(row + 4 * j, &value, 4);
    return;
  }
  const uint16_t bits = narrow(value, dtype);
  std::memcpy(row + 2 * j, &bits, 2);
}

inline float sanitised(float lse) { return lse < std::numeric_limits<float>::infinity() ? lse : -std::numeric_limits<float>::infinity(); }

class Call {
 public:
  explicit Call(const ExchangeParams& params)
      : p_(params),
        layout_(params.layout()),
        mine_(params.workspaces[params.rank]),
        control_(*reinterpret_cast<Control*>(mine_)),
        deadline_(std::chrono::steady_clock::now() + std::chrono::nanoseconds(params.timeout_ns)),
        accumulator_(static_cast<size_t>(params.dim)),
        arrived_(static_cast<size_t>(params.cp) * static_cast<size_t>(layout_.row_bytes)) {}

  void run() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::atomic_ref counter(control_.call_and_tickets);
    call_ = call_of(counter.load(std::memory_order_relaxed));
    const auto rows = static_cast<uint32_t>(p_.rows());
    const Schedule schedule = Schedule::of(rows, kRowsPerItem, static_cast<uint32_t>(p_.cp - 1), kLead);
    const bool dead_on_entry = dead();
    foreign_ = p_.place != nullptr && *p_.place != p_.own_place;
    if (foreign_ && !dead_on_entry) report({true, kForeign, static_cast<int>(*p_.place), call_});
    for (uint32_t t = 0; t < schedule.items(); ++t) {
      const Item item = schedule[t];
      if (item.receive) {
        for_rows(item.index, rows, [&](uint32_t row) {
          if (dead_on_entry) return fill_nan(static_cast<int>(row));  // what lies in the slot may be an earlier call's
          receive(static_cast<int>(row));
        });
      } else if (!dead_on_entry) {
        for_rows(item.index, rows * schedule.peers, [&](uint32_t entry) { send(entry, schedule.peers); });
      }
    }
    counter.store(first_of_call(call_ + 1), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

 private:
  template <class Action>
  static void for_rows(uint32_t item, uint32_t end, Action action) {
    for (uint32_t i = item * kRowsPerItem; i < end && i < (item + 1) * kRowsPerItem; ++i) action(i);
  }

  const uint8_t* input_row(int token, int head) const {
    return static_cast<const uint8_t*>(p_.o) + itemsize(p_.dtype) * (token * p_.o_token_stride + head * p_.o_head_stride);
  }
  float input_lse(int token, int head) const {
    return sanitised(p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride]);
  }

  void send(uint32_t entry, uint32_t peers) {
    const int peer = (p_.rank + 1 + static_cast<int>(entry % peers)) % p_.cp;
    const int row = static_cast<int>(entry / peers), token = row / p_.heads_per_rank, head = p_.head(peer, row);
    uint8_t* theirs = p_.workspaces[peer];
    const bool real = head < p_.heads;
    const float lse = real ? input_lse(token, head) : -std::numeric_limits<float>::infinity();
    if (real) {
      auto* target = reinterpret_cast<uint64_t*>(theirs + layout_.data(call_, p_.rank, peer, row));
      const uint8_t* source = input_row(token, head);
      for (int i = 0; i < layout_.row_bytes / 8; ++i) {
        uint64_t pair;
        std::memcpy(&pair, source + 8 * i, 8);
        const uint64_t low = outgoing(static_cast<uint32_t>(pair)), high = outgoing(static_cast<uint32_t>(pair >> 32));
        std::atomic_ref(target[i]).store(high << 32 | low, std::memory_order_relaxed);
      }
    }
    auto* target = reinterpret_cast<uint32_t*>(theirs + layout_.lse(call_, p_.rank, peer, row));
    std::atomic_ref(*target).store(std::bit_cast<uint32_t>(lse), std::memory_order_relaxed);
  }

  void receive(int row) {
    const int token = row / p_.heads_per_rank, head = p_.head(p_.rank, row);
    float lse[kMaxRanks];
    for (int source = 0; source < p_.cp; ++source) {
      if (source == p_.rank) {
        lse[source] = head < p_.heads ? input_lse(token, head) : -std::numeric_limits<float>::infinity();
      } else if (!take(source, row, head < p_.heads, &lse[source])) {
        return fill_nan(row);
      }
    }
    if (head >= p_.heads) std::memset(arrived_.data(), 0, arrived_.size());
    else std::memcpy(arrived(p_.rank), input_row(token, head), static_cast<size_t>(layout_.row_bytes));
    if (foreign_) return fill_nan(row);
    merge(row, lse);
  }

  uint8_t* arrived(int source) { return arrived_.data() + static_cast<size_t>(source) * static_cast<size_t>(layout_.row_bytes); }

  // Waits for a source's row, copies it and blanks it; false if the wait expired.
  bool take(int source, int row, bool with_data, float* lse) {
    uint32_t bits;
    if (!take_word(reinterpret_cast<uint32_t*>(mine_ + layout_.lse(call_, source, p_.rank, row)), source, row, &bits)) return false;
    *lse = std::bit_cast<float>(bits);
    if (!with_data) return true;
    auto* words = reinterpret_cast<uint64_t*>(mine_ + layout_.data(call_, source, p_.rank, row));
    for (int i = 0; i < layout_.row_bytes / 8; ++i) {
      uint64_t pair;
      if (!take_word(words + i, source, row, &pair)) return false;
      std::memcpy(arrived(source) + 8 * i, &pair, 8);
    }
    return true;
  }

  static bool has_blank(uint32_t word) { return word == kBlank; }
  static bool has_blank(uint64_t pair) {
    return has_blank(static_cast<uint32_t>(pair)) || has_blank(static_cast<uint32_t>(pair >> 32));
  }

  template <class Word>
  bool take_word(Word* address, int source, int row, Word* value) {
    const std::atomic_ref word(*address);
    while (has_blank(*value = word.load(std::memory_order_relaxed))) {
      if (expired(source, row)) return false;
    }
    word.store(static_cast<Word>(~Word{0}), std::memory_order_relaxed);
    return true;
  }

  bool dead() const { return std::atomic_ref(control_.dead).load(std::memory_order_relaxed) != 0; }

  bool expired(int source, int row) {
    if (dead()) return true;
    if (++spins_ % kSpinsPerYield != 0) return false;
    sched_yield();
    if (std::chrono::steady_clock::now() < deadline_) return false;
    std::atomic_ref(control_.dead).store(1, std::memory_order_relaxed);
    report({true, source, row, call_});
    return true;
  }

  // The first report stays.
  void report(const Expiry& expiry) {
    uint64_t none = 0;
    std::atomic_ref(*p_.status).compare_exchange_strong(none, expiry.packed());
  }

  uint8_t* output(int row) const { return static_cast<uint8_t*>(p_.out) + static_cast<int64_t>(row) * layout_.row_bytes; }

  void merge(int row, const float* lse) {
    const bool two = p_.base == Base::two;
    float m = -std::numeric_limits<float>::infinity(), sum = 0.0f, weight[kMaxRanks];
    for (int i = 0; i < p_.cp; ++i) m = std::fmax(m, lse[i]);
    if (std::isinf(m)) m = 0.0f;
    for (int i = 0; i < p_.cp; ++i) sum += weight[i] = two ? std::exp2(lse[i] - m) : std::exp(lse[i] - m);
    std::fill(accumulator_.begin(), accumulator_.end(), 0.0f);
    for (int i = 0; i < p_.cp; ++i) {
      if (weight[i] == 0.0f) continue;  // selects 0: an empty shard's payload may be NaN
      for (int j = 0; j < p_.dim; ++j) {
        accumulator_[static_cast<size_t>(j)] += weight[i] / sum * load(arrived(i), j, p_.dtype);
      }
    }
    for (int j = 0; j < p_.dim; ++j) store(output(row), j, accumulator_[static_cast<size_t>(j)], p_.dtype);
    if (p_.out_lse != nullptr) {
      p_.out_lse[row] = sum > 0.0f ? m + (two ? std::log2(sum) : std::log(sum)) : -std::numeric_limits<float>::infinity();
    }
  }

  void fill_nan(int row) {
    for (int j = 0; j < p_.dim; ++j) store(output(row), j, std::numeric_limits<float>::quiet_NaN(), p_.dtype);
    if (p_.out_lse != nullptr) p_.out_lse[row] = std::numeric_limits<float>::quiet_NaN();
  }

  const ExchangeParams& p_;
  const Layout layout_;
  uint8_t* const mine_;
  Control& control_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<float> accumulator_;
  std::vector<uint8_t> arrived_;  // one row per source
  uint32_t call_ = 0;
  bool foreign_ = false;
  int spins_ = 0;
};

inline void exchange(const ExchangeParams& params) { Call(params).run(); }

}  // namespace jaxcp::twin

// Host-side facts of the kernel's work order: every item once, receives after what feeds them, exact quotients.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "plan.h"

using namespace jaxcp;

namespace {

void expect(bool condition, const char* what, uint64_t a, uint64_t b) {
  if (condition) return;
  std::printf("FAILED: %s (%llu, %llu)\n", what, static_cast<unsigned long long>(a),
              static_cast<unsigned long long>(b));
  std::exit(1);
}

void check_order(uint32_t rows, uint32_t per_item, uint32_t peers, uint32_t lead) {
  const Schedule schedule = Schedule::of(rows, per_item, peers, lead);
  std::vector<bool> sent(schedule.sends), received(schedule.receives);
  uint32_t sends = 0;
  for (uint32_t t = 0; t < schedule.items(); ++t) {
    const Item item = schedule[t];
    auto& done = item.receive ? received : sent;
    expect(item.index < done.size() && !done[item.index], "every item once", t, item.index);
    done[item.index] = true;
    if (!item.receive) {
      expect(item.index == sends++, "sends in order", t, item.index);
      continue;
    }
    // The last row of receive j, of any source: its send is this entry of that source's list, whatever the destination.
    const uint64_t last_row = std::min<uint64_t>(uint64_t{item.index + 1} * per_item, rows) - 1;
    expect(sends > (last_row * peers + peers - 1) / per_item, "receives after the sends that feed them", t, item.index);
  }
}

void check_quotients(uint32_t divisor) {
  const Divider by = Divider::of(divisor);
  const auto check = [&](uint64_t n) {
    if (n < (1ull << 31)) expect(by.quotient(static_cast<uint32_t>(n)) == n / divisor, "exact quotients", n, divisor);
  };
  for (uint64_t n = 0; n < 300; ++n) check(n);
  for (uint64_t k = 1; k < (1ull << 31) / divisor; k += 1 + k / 64) check(k * divisor - 1), check(k * divisor);
  check((1ull << 31) - 1);
}

}  // namespace

int main() {
  for (uint32_t rows : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 63u, 64u, 129u, 512u}) {
    for (uint32_t per_item : {1u, 4u, 8u, 64u}) {
      for (uint32_t peers : {1u, 2u, 3u, 7u, 8u, 63u}) {
        for (uint32_t lead : {0u, 1u, 2u, 7u, 13u, 100u, 100000u}) check_order(rows, per_item, peers, lead);
      }
    }
  }
  for (uint32_t divisor = 1; divisor < 70; ++divisor) check_quotients(divisor);
  for (uint32_t divisor : {127u, 128u, 129u, 1000003u, 16777215u, 2147483647u}) check_quotients(divisor);
  std::printf("ok\n");
}

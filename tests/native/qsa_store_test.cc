// The integers of kernels/csrc/qsa/store_plan.h against a request's tokens one after another; plain C++.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "qsa/store_plan.h"

using namespace jaxcp::qsa;

namespace {

void expect(bool right, const char* what, int ratio, int ring, const Run& run) {
  if (right) return;
  std::printf("%s: ratio %d, ring %d, prefix %d, count %d\n", what, ratio, ring, run.prefix, run.count);
  std::exit(1);
}

// Blocks that become complete while tokens come one by one, and the newest token of every slot.
void check_run(int ratio, int ring, const Run& run) {
  std::vector<int> finished;
  std::map<int, int> newest;
  for (int position = 0; position < run.total(); ++position) {
    newest[position % ring] = position;
    if (position >= run.prefix && (position + 1) % ratio == 0) finished.push_back(position / ratio);
  }
  expect(run.blocks(ratio) == static_cast<int>(finished.size()), "blocks", ratio, ring, run);
  for (size_t i = 0; i < finished.size(); ++i) {
    expect(run.begun(ratio) + static_cast<int>(i) == finished[i], "block", ratio, ring, run);
  }
  const bool older = !finished.empty() && finished[0] * ratio < run.prefix;
  expect(run.straddles(ratio) == older, "straddles", ratio, ring, run);
  for (int slot = 0; slot < ring; ++slot) {
    const int want = newest.count(slot) ? newest[slot] : -1, got = newest_in_slot(run.total(), slot, ring);
    expect(want < 0 ? got < 0 : got == want, "slot", ratio, ring, run);
  }
  for (int position = 0; position < run.total(); ++position) {
    const int row = run.row_of(position);
    expect(position < run.prefix ? row < 0 : row == run.first_row + position - run.prefix, "row", ratio, ring, run);
  }
}

void check_places() {
  const int32_t table[] = {0, 3, 9, /**/ 2, 0, 1};  // two requests of three pages of 8; pages 0 ... 3
  const auto place = [&](int request, int position) { return place_of(table, 2, 3, 4, 8, request, position); };
  const bool right = place(0, 8) == 24 && place(0, 15) == 31 && place(1, 0) == 16 && place(1, 23) == 15 &&
                     place(0, 0) == -1 && place(0, 16) == -1 &&  // no page; a page that is not there
                     place(0, 24) == -1 && place(0, -1) == -1 && place(-1, 0) == -1 && place(2, 0) == -1;
  if (!right) std::printf("places\n"), std::exit(1);
}

}  // namespace

int main() {
  for (const int ratio : {1, 2, 4, 16}) {
    for (int most_query = 1; most_query <= 5; ++most_query) {
      for (int prefix = 0; prefix <= 40; ++prefix) {
        for (int count = 0; count <= 40; ++count) check_run(ratio, ratio - 1 + most_query, Run{7, count, prefix, 0});
      }
    }
  }
  check_places();
  std::printf("ok\n");
}

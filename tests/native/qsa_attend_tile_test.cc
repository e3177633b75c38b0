// The lists of sparse attention's tiles (kernels/csrc/qsa/attend_tile.h), step by step as the kernel takes them,
// against what they mean: for every row, the tokens of its entries are those of its selection and its tail, each once.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "qsa/attend_tile.h"

using namespace jaxcp::qsa;

namespace {

struct Tile {
  int ratio = 4, page_size = 16, table_width = 0, width = 0;
  std::vector<int32_t> request, position;
  std::vector<std::vector<int32_t>> ids, table;  // by row, by request
};

struct List {
  int complete = 0;
  std::vector<int32_t> entries;
};

// As build_lists does, a thread at a time.
List build(const Tile& tile) {
  const int rows = static_cast<int>(tile.request.size()), per_page = tile.page_size / tile.ratio;
  List list;
  for (int leader = 0; leader < rows; ++leader) {
    const Group group = group_of(tile.request.data(), tile.position.data(), rows, leader, tile.ratio);
    if (group.members == 0) continue;
    const int32_t* table = tile.table[tile.request[leader]].data();
    for (int window = 0; window < group.blocks; window += 32 * kWindow) {
      static uint32_t bitmaps[kMostRows][kWindow];
      std::fill(&bitmaps[0][0], &bitmaps[0][0] + kMostRows * kWindow, 0);
      for (int row = 0; row < rows; ++row) {
        if ((group.members >> row & 1) == 0) continue;
        for (const int id : tile.ids[row]) mark(bitmaps[row], id, window);
      }
      for (int word = 0; word < kWindow; ++word) {
        const uint32_t any = union_word(bitmaps, rows, word);
        const size_t at = list.entries.size();
        list.entries.resize(at + __builtin_popcount(any));
        emit(bitmaps, rows, word, window + 32 * word, any, table, tile.table_width, per_page, list.entries.data() + at);
      }
    }
  }
  list.complete = static_cast<int>(list.entries.size());
  for (int row = 0; row < rows; ++row) {
    if (tail_of(tile.position[row], tile.ratio) == 0) continue;
    list.entries.push_back(tail_entry(tile.table[tile.request[row]].data(), tile.table_width, per_page,
                                      tile.position[row], tile.ratio, row));
  }
  return list;
}

// What is wrong with a list, or null.
const char* fault(const Tile& tile, const List& list) {
  const int rows = static_cast<int>(tile.request.size());
  if (list.entries.size() > static_cast<size_t>(rows * (tile.width + 1))) return "a list overflows";
  std::set<std::pair<uint32_t, bool>> seen;
  std::vector<std::vector<int64_t>> got(rows);
  for (size_t i = 0; i < list.entries.size(); ++i) {
    const uint32_t entry = list.entries[i];
    const bool tail = static_cast<int>(i) >= list.complete;
    if (entry_rows(entry) == 0) return "an entry of nobody";
    if (!tail && !seen.insert({entry_slot(entry), tail}).second) return "a block twice";
    for (int token = 0; token < tile.ratio; ++token) {
      const uint32_t members = rows_of_token(entry, tail, token, tile.position.data(), tile.ratio);
      for (int row = 0; row < rows; ++row) {
        if (members >> row & 1) got[row].push_back(int64_t{entry_slot(entry)} * tile.ratio + token);
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    std::vector<int64_t> want;
    const auto add = [&](int token) {
      want.push_back(int64_t{tile.table[tile.request[row]][token / tile.page_size]} * tile.page_size +
                     token % tile.page_size);
    };
    const int end = tile.position[row] + 1;
    for (const int id : tile.ids[row]) {
      for (int token = 0; id >= 0 && token < tile.ratio; ++token) add(id * tile.ratio + token);
    }
    for (int token = end - end % tile.ratio; token < end; ++token) add(token);
    std::sort(want.begin(), want.end());
    std::sort(got[row].begin(), got[row].end());
    if (want != got[row]) return "a row's tokens are not its selection's";
  }
  return nullptr;
}

// Rows of up to three requests, some padding; each row chooses blocks near its neighbour's choice or anywhere.
Tile random_tile(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Tile tile;
  tile.ratio = 1 << below(4);
  tile.page_size = tile.ratio * (1 + below(6));
  tile.width = 1 + below(60);
  const int rows = 1 + below(kMostRows), requests = 1 + below(3),
            context = below(2) ? 40 + below(200) : 90000 + below(5000);
  tile.table_width = (context + tile.page_size - 1) / tile.page_size;
  std::vector<int32_t> pages(requests * tile.table_width);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i + 1);
  std::shuffle(pages.begin(), pages.end(), random);
  for (int r = 0; r < requests; ++r) {
    tile.table.emplace_back(pages.begin() + r * tile.table_width, pages.begin() + (r + 1) * tile.table_width);
  }
  int position = below(2) ? below(context - 8) : context - 8 - below(5);
  for (int row = 0; row < rows; ++row) {
    tile.request.push_back(below(4) ? 0 : below(requests));
    tile.position.push_back(below(8) ? position++ : -1);
    const int visible = (tile.position.back() + 1) / tile.ratio;
    std::set<int32_t> ids;
    if (row > 0) {
      for (const int id : tile.ids[row - 1]) {
        if (id >= 0 && id < visible && below(3)) ids.insert(id);
      }
    }
    for (int i = 0; i < tile.width && visible > 0; ++i) ids.insert(below(visible));
    std::vector<int32_t> chosen(ids.begin(), ids.end());
    if (static_cast<int>(chosen.size()) > tile.width) chosen.resize(tile.width);
    chosen.resize(tile.width, -1);
    tile.ids.push_back(chosen);
  }
  return tile;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int i = 0; i < 3000; ++i) {
    const Tile tile = random_tile(random);
    const List list = build(tile);
    if (const char* why = fault(tile, list)) return std::printf("tile %d: %s\n", i, why), 1;
    if (list.entries.empty()) continue;
    // The judge sees one wrong bit: a row too many or too few, another block.
    List broken = list;
    const int bit = static_cast<int>(random() % 9), rows = static_cast<int>(tile.request.size());
    broken.entries[random() % broken.entries.size()] ^= 1 << (bit < rows ? bit : 8);
    if (fault(tile, broken) == nullptr) return std::printf("tile %d: a wrong bit went unnoticed\n", i), 1;
  }
  std::puts("ok");
  return 0;
}

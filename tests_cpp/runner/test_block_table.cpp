#include <doctest/doctest.h>

#include <vector>

#include "cpp/src/runner/block_table.h"

using deltaic::BlockTable;

namespace {

std::vector<int> entries(const BlockTable& table, int row) {
  const auto* first = table.view(row + 1).as<std::int32_t>() + row * table.row_stride();
  return {first, first + table.row_stride()};
}

constexpr int kNull = BlockTable::kNull;

}  // namespace

TEST_CASE("block tables are persistent with one row stride in elements") {
  BlockTable table(3, 4);
  table.assign(0, std::vector<int>{7, 8, 9});
  table.assign(1, std::vector<int>{4});
  table.append(1, std::vector<int>{5});
  CHECK(table.row_stride() == 4);
  CHECK(table.view(2).shape[1] == 4);
  CHECK(table.view(2).is_contiguous());
  CHECK(entries(table, 0) == std::vector<int>{7, 8, 9, kNull});
  CHECK(entries(table, 1) == std::vector<int>{4, 5, kNull, kNull});
  CHECK(entries(table, 2) == std::vector<int>{kNull, kNull, kNull, kNull});
}

TEST_CASE("D62: a vacated row reads as null, also after a shorter one took its place") {
  BlockTable table(2, 4);
  table.assign(0, std::vector<int>{7, 8, 9});
  table.assign(1, std::vector<int>{4, 5});
  table.clear(0);
  CHECK(entries(table, 0) == std::vector<int>{kNull, kNull, kNull, kNull});
  table.swap(0, 1);
  CHECK(entries(table, 0) == std::vector<int>{4, 5, kNull, kNull});
  CHECK(entries(table, 1) == std::vector<int>{kNull, kNull, kNull, kNull});
  CHECK(table.num_blocks(1) == 0);
  table.assign(0, std::vector<int>{1});
  CHECK(entries(table, 0) == std::vector<int>{1, kNull, kNull, kNull});
}

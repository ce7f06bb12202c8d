#include "cpp/src/runner/block_table.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace deltaic {

BlockTable::BlockTable(int max_num_reqs, std::int64_t row_stride)
    : row_stride_(row_stride),
      entries_(static_cast<std::size_t>(max_num_reqs * row_stride), kNull),
      num_blocks_(static_cast<std::size_t>(max_num_reqs), 0) {}

void BlockTable::assign(int row, std::span<const int> block_ids) {
  clear(row);
  append(row, block_ids);
}

void BlockTable::append(int row, std::span<const int> block_ids) {
  int& count = num_blocks_[static_cast<std::size_t>(row)];
  assert(count + static_cast<std::int64_t>(block_ids.size()) <= row_stride_);
  std::copy(block_ids.begin(), block_ids.end(), entries(row) + count);
  count += static_cast<int>(block_ids.size());
}

void BlockTable::clear(int row) {
  int& count = num_blocks_[static_cast<std::size_t>(row)];
  std::fill_n(entries(row), count, kNull);
  count = 0;
}

void BlockTable::swap(int a, int b) {
  int& count_a = num_blocks_[static_cast<std::size_t>(a)];
  int& count_b = num_blocks_[static_cast<std::size_t>(b)];
  std::swap_ranges(entries(a), entries(a) + std::max(count_a, count_b), entries(b));
  std::swap(count_a, count_b);
}

std::span<const std::int32_t> BlockTable::row(int row) const {
  return {entries_.data() + row * row_stride_, static_cast<std::size_t>(num_blocks(row))};
}

TensorView BlockTable::view(int num_rows) const {
  return make_view(const_cast<std::int32_t*>(entries_.data()), DType::i32, {num_rows, row_stride_});
}

}  // namespace deltaic

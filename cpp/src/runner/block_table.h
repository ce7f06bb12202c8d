#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <deltaic/tensor.h>

namespace deltaic {

// The block ids of every row for one KV-cache group: [max_num_reqs, row_stride] i32, persistent between steps. Entries
// past a row's end, and those of a vacated row, are kNull: no block, never read.
class BlockTable {
 public:
  static constexpr std::int32_t kNull = -1;

  BlockTable(int max_num_reqs, std::int64_t row_stride);

  // Replaces the ids of a row; append adds to them. At most row_stride ids: the caller has checked.
  void assign(int row, std::span<const int> block_ids);
  void append(int row, std::span<const int> block_ids);
  void clear(int row);
  void swap(int a, int b);

  int num_blocks(int row) const { return num_blocks_[static_cast<std::size_t>(row)]; }
  std::span<const std::int32_t> row(int row) const;
  std::int64_t row_stride() const { return row_stride_; }
  // [num_rows, row_stride], valid until the table is destroyed.
  TensorView view(int num_rows) const;

 private:
  std::int32_t* entries(int row) { return entries_.data() + row * row_stride_; }

  std::int64_t row_stride_;
  std::vector<std::int32_t> entries_;
  std::vector<int> num_blocks_;
};

}  // namespace deltaic

#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "cpp/src/core/buffer.h"
#include "cpp/src/loader/checkpoint.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// Takes a model's tensors from a checkpoint and counts their bytes. Names are without the checkpoint's prefix. All
// throw as Checkpoint::get does, and Unsupported for a dtype that is not a floating-point one.
class WeightReader {
 public:
  explicit WeightReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  bool has(std::string_view name) const { return checkpoint_.has(name); }
  const Checkpoint& checkpoint() const { return checkpoint_; }

  // [out_features, in_features] in f32, f16 or bf16, as it is stored: a view of the checkpoint. A tensor that does not
  // lie at a multiple of its element size is copied.
  ops::Weight matrix(std::string_view name, std::int64_t out_features, std::int64_t in_features);
  // [count, out_features, in_features] as one matrix of count * out_features rows.
  ops::Weight stacked_matrices(std::string_view name, std::int64_t count, std::int64_t out_features,
                               std::int64_t in_features);
  // A small tensor in f32, with `offset` added. Its own memory.
  Tensor values(std::string_view name, std::initializer_list<std::int64_t> shape, float offset = 0.0F);

  // Bytes of all that was taken, in the memory where it is used.
  std::int64_t num_bytes() const { return num_bytes_; }

 private:
  ops::Weight take(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows);

  const Checkpoint& checkpoint_;
  std::int64_t num_bytes_ = 0;
};

// Rows [begin, end) of a matrix.
ops::Weight rows(const ops::Weight& matrix, std::int64_t begin, std::int64_t end);

}  // namespace deltaic

#pragma once

#include <initializer_list>

#include <deltaic/tensor.h>

#include "cpp/src/core/buffer.h"

namespace deltaic {

// What the sizes of a layer's tensors follow from: a step, or the limits of all steps.
struct StepShape {
  Device device;
  DType dtype = DType::f32;  // of activations
  std::int64_t num_tokens = 0, num_seqs = 0;
  std::int64_t num_decodes = 0, max_decode_query_len = 1, max_seq_len = 0;  // of ForwardInputs
  std::int64_t num_verified = 0;                                            // sequences (ops::GdnSequences)
};

// Hands out tensors from one buffer, front to back. What a layer takes is valid until the next reset(): the mixers and
// the feed-forwards of all layers share the memory, as no two of them run at once. A layer takes its tensors in one
// function, which is also what measures how much it needs.
class Workspace {
 public:
  // Measures: hands out tensors without memory, so that num_taken_bytes() says what a layer needs.
  Workspace() = default;
  // Throws as Buffer does.
  Workspace(std::size_t num_bytes, Device device) : buffer_(num_bytes, device), device_(device), measures_(false) {}

  // A contiguous tensor, 64-byte aligned, its content undefined. Throws InvalidArgument when the buffer is too small.
  TensorView take(DType dtype, std::initializer_list<std::int64_t> shape);
  void reset() { num_taken_bytes_ = 0; }
  std::size_t num_taken_bytes() const { return num_taken_bytes_; }

 private:
  Buffer buffer_;
  Device device_;
  bool measures_ = true;
  std::size_t num_taken_bytes_ = 0;
};

// [num_tokens, num_heads * dim] as [num_tokens, num_heads, dim], with any row stride.
TensorView as_heads(const TensorView& rows, std::int64_t num_heads, std::int64_t dim);
// Channels [begin, begin + count) of every head.
TensorView part_of_heads(const TensorView& heads, std::int64_t begin, std::int64_t count);
// Columns [begin, begin + count) of every row of a matrix.
TensorView columns(const TensorView& matrix, std::int64_t begin, std::int64_t count);

}  // namespace deltaic

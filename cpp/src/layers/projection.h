#pragma once

#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/layer_input.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// Products of one input whose results lie beside each other in a row a token. On the CPU each has the checkpoint's
// matrix, on CUDA all are one matrix.
struct Projection {
  struct Part {
    ops::Weight weight;
    std::int64_t first_column = 0;
  };
  std::vector<Part> parts;
  std::int64_t row_size = 0;
  Tensor bias;  // [row_size] f32; without memory when there is none

  // Appends a part to the row.
  void add(ops::Weight weight);

  //   y  [num_tokens, row_size] f32 or the input's dtype, any row stride
  void forward(const ops::Context& ctx, LayerInput& input, TensorView y) const;

  // The one matrix, when linear can apply norm or activation to a product with it; null elsewhere.
  const ops::Weight* fusing_weight(const ops::Context& ctx, const LayerInput& input) const;
};

}  // namespace deltaic

#pragma once

#include "cpp/src/layers/projection.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// SwiGLU (docs/models.md, "Feed-forward").
struct Mlp {
  Projection gate_up_proj;  // [gate | up]
  ops::Weight down_proj;

  struct Buffers {
    TensorView gate_up;  // [num_tokens, 2 * intermediate_size]
  };
  Buffers take_buffers(Workspace& workspace, const StepShape& shape) const;

  // y = mlp(input), or y += mlp(input).
  //   y  [num_tokens, hidden_size]; += may be into the input's residual stream
  void forward(const ops::Context& ctx, LayerInput& input, const Buffers& buffers, bool accumulate, TensorView y) const;
};

}  // namespace deltaic

#pragma once

#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// SwiGLU (model-spec section 10).
struct Mlp {
  ops::Weight gate_proj, up_proj, down_proj;

  struct Buffers {
    TensorView gate, up;  // [num_tokens, intermediate_size]
  };
  Buffers take_buffers(Workspace& workspace, std::int64_t num_tokens) const;

  // y = mlp(x), or y += mlp(x).
  //   x, y  [num_tokens, hidden_size]; must not overlap
  void forward(const ops::Context& ctx, TensorView x, const Buffers& buffers, bool accumulate, TensorView y) const;
};

}  // namespace deltaic

#include "cpp/src/layers/mlp.h"

#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

Mlp::Buffers Mlp::take_buffers(Workspace& workspace, std::int64_t num_tokens) const {
  return {.gate = workspace.take(DType::f32, {num_tokens, gate_proj.out_features()}),
          .up = workspace.take(DType::f32, {num_tokens, up_proj.out_features()})};
}

void Mlp::forward(const ops::Context& ctx, TensorView x, const Buffers& buffers, bool accumulate, TensorView y) const {
  ops::linear(ctx, x, gate_proj, buffers.gate);
  ops::linear(ctx, x, up_proj, buffers.up);
  ops::silu_mul(ctx, buffers.gate, buffers.up, buffers.gate);
  ops::linear(ctx, buffers.gate, down_proj, {.bias = {}, .accumulate = accumulate}, y);
}

}  // namespace deltaic

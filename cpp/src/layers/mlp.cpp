#include "cpp/src/layers/mlp.h"

#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

Mlp::Buffers Mlp::take_buffers(Workspace& workspace, const StepShape& shape) const {
  return {.gate_up = workspace.take(shape.dtype, {shape.num_tokens, gate_up_proj.row_size})};
}

void Mlp::forward(const ops::Context& ctx, LayerInput& input, const Buffers& buffers, bool accumulate,
                  TensorView y) const {
  const std::int64_t size = gate_up_proj.row_size / 2;
  const TensorView gate = columns(buffers.gate_up, 0, size);  // and then silu(gate) * up
  const ops::Weight* fusing = gate_up_proj.fusing_weight(ctx, input);
  if (fusing != nullptr && !input.is_normed()) {
    ops::linear(ctx, input.x(), *fusing, {.bias = {}, .norm = input.norm(), .silu_mul = true}, gate);
  } else {
    gate_up_proj.forward(ctx, input, buffers.gate_up);
    ops::silu_mul(ctx, gate, columns(buffers.gate_up, size, size), gate);
  }
  ops::linear(ctx, gate, down_proj, {.bias = {}, .accumulate = accumulate}, y);
}

}  // namespace deltaic

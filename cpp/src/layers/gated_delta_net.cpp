#include "cpp/src/layers/gated_delta_net.h"

#include "cpp/src/ops/gdn_mixer.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

GatedDeltaNet::Buffers GatedDeltaNet::take_buffers(Workspace& workspace, const StepShape& step) const {
  const auto num_bytes =
      ops::gdn_mixer_workspace_bytes(step.device, shape, step.dtype, step.num_tokens, step.num_seqs, step.num_verified);
  return {
      .proj = workspace.take(step.dtype, {step.num_tokens, in_proj.row_size}),
      .mixer = workspace.take(DType::u8, {static_cast<std::int64_t>(num_bytes)}),
      .out = workspace.take(step.dtype, {step.num_tokens, std::int64_t{shape.num_value_heads} * shape.value_head_dim})};
}

void GatedDeltaNet::forward(const ops::Context& ctx, LayerInput& input, const StepShape& step,
                            const ops::GdnSequences& sequences, TensorView conv_state, TensorView temporal,
                            TensorView replay, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, step);
  in_proj.forward(ctx, input, buffers.proj);
  ops::gdn_mixer(ctx, {.shape = shape,
                       .layout = layout,
                       .proj = buffers.proj,
                       .conv_weight = conv1d.view().reshape({shape.conv_dim(), shape.conv_kernel}),
                       .A_log = A_log.view(),
                       .dt_bias = dt_bias.view(),
                       .norm_weight = norm.view(),
                       .eps = eps,
                       .sequences = sequences,
                       .conv_state = conv_state,
                       .temporal = temporal,
                       .replay = replay,
                       .workspace = buffers.mixer,
                       .out = as_heads(buffers.out, shape.num_value_heads, shape.value_head_dim)});
  ops::linear(ctx, buffers.out, out_proj, {.bias = {}, .accumulate = true}, y);
}

}  // namespace deltaic

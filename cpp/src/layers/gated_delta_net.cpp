#include "cpp/src/layers/gated_delta_net.h"

#include "cpp/src/ops/gdn_mixer.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

void GatedDeltaNet::add_projection(ops::Weight weight) {
  const std::int64_t num_columns = weight.out_features();
  in_proj.push_back({.weight = std::move(weight), .first_column = row_size});
  row_size += num_columns;
}

GatedDeltaNet::Buffers GatedDeltaNet::take_buffers(Workspace& workspace, std::int64_t num_tokens) const {
  // There may be as many sequences as tokens.
  const auto num_bytes =
      ops::gdn_mixer_workspace_bytes(conv1d.view().device, shape, DType::f32, num_tokens, num_tokens);
  return {.proj = workspace.take(DType::f32, {num_tokens, row_size}),
          .mixer = workspace.take(DType::u8, {static_cast<std::int64_t>(num_bytes)}),
          .out = workspace.take(DType::f32, {num_tokens, std::int64_t{shape.num_value_heads} * shape.value_head_dim})};
}

void GatedDeltaNet::forward(const ops::Context& ctx, TensorView x, const ops::GdnSequences& sequences,
                            TensorView conv_state, TensorView temporal, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, x.shape[0]);
  for (const Projection& projection : in_proj)
    ops::linear(ctx, x, projection.weight,
                columns(buffers.proj, projection.first_column, projection.weight.out_features()));
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
                       .workspace = buffers.mixer,
                       .out = as_heads(buffers.out, shape.num_value_heads, shape.value_head_dim)});
  ops::linear(ctx, buffers.out, out_proj, {.bias = {}, .accumulate = true}, y);
}

}  // namespace deltaic

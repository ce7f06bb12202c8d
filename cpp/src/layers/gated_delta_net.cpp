#include "cpp/src/layers/gated_delta_net.h"

#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic {

void GatedDeltaNet::add_projection(ops::Weight weight) {
  const std::int64_t num_columns = weight.out_features();
  in_proj.push_back({.weight = std::move(weight), .first_column = row_size});
  row_size += num_columns;
}

GatedDeltaNet::Buffers GatedDeltaNet::take_buffers(Workspace& workspace, std::int64_t num_tokens) const {
  return {.proj = workspace.take(DType::f32, {num_tokens, row_size}),
          .qkv = workspace.take(DType::f32, {num_tokens, shape.conv_dim()}),
          .out = workspace.take(DType::f32, {num_tokens, std::int64_t{shape.num_value_heads} * shape.value_head_dim})};
}

void GatedDeltaNet::forward(const ops::Context& ctx, TensorView x, const ops::GdnSequences& sequences,
                            TensorView conv_state, TensorView temporal, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, x.shape[0]);
  for (const Projection& projection : in_proj)
    ops::linear(ctx, x, projection.weight,
                columns(buffers.proj, projection.first_column, projection.weight.out_features()));
  const TensorView taps = conv1d.view().reshape({shape.conv_dim(), shape.conv_kernel});
  ops::causal_conv(ctx, shape, layout, buffers.proj, taps, sequences, conv_state, buffers.qkv);
  const TensorView out = as_heads(buffers.out, shape.num_value_heads, shape.value_head_dim);
  ops::gated_delta_rule(ctx, shape, layout, buffers.qkv, buffers.proj, A_log.view(), dt_bias.view(), sequences,
                        temporal, out);
  apply_norm_and_gate(ctx, buffers.proj, buffers.out);
  ops::linear(ctx, buffers.out, out_proj, {.bias = {}, .accumulate = true}, y);
}

void GatedDeltaNet::apply_norm_and_gate(const ops::Context& ctx, const TensorView& proj, const TensorView& out) const {
  // Heads whose gates lie at one stride go in one call: all of them, or those of a group.
  const std::int64_t group_size = std::int64_t{shape.heads_per_group()} * shape.value_head_dim;
  const bool is_plain = layout.z_group_stride == group_size;
  const int num_calls = is_plain ? 1 : shape.num_key_heads;
  const int num_heads = shape.num_value_heads / num_calls;
  const std::int64_t size = std::int64_t{num_heads} * shape.value_head_dim;
  for (int i = 0; i < num_calls; ++i) {
    const TensorView heads = as_heads(columns(out, i * size, size), num_heads, shape.value_head_dim);
    const TensorView z = columns(proj, layout.z + i * layout.z_group_stride, size);
    ops::gated_rms_norm(ctx, heads, as_heads(z, num_heads, shape.value_head_dim), norm.view(), eps, heads);
  }
}

}  // namespace deltaic

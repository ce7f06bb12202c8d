#include "cpp/src/ops/gated_delta_net.h"

#include "cpp/src/ops/gdn_checks.h"

namespace deltaic::ops {

void causal_conv(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView proj,
                 TensorView weight, const GdnSequences& sequences, TensorView conv_state, TensorView out) {
  const char* op = "causal_conv";
  check_gdn_shape(op, shape);
  check_gdn_sequences(op, sequences, ctx);
  check_gdn_activation(op, "proj", proj, ctx, {kAnySize, kAnySize});
  check_gdn_layout(op, shape, layout, proj.shape[1]);
  check_contiguous(op, "weight", weight, ctx, {DType::f32}, {shape.conv_dim(), shape.conv_kernel});
  check_gdn_conv_state(op, conv_state, shape, sequences.num_draft_tokens, ctx);
  check_contiguous(op, "out", out, ctx, {proj.dtype}, {proj.shape[0], shape.conv_dim()});
  if (sequences.state_indices.shape[0] == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::causal_conv(threads_of(op, ctx), shape, layout, proj, weight, sequences, conv_state, out);
    case DeviceType::cuda:
      return cuda::causal_conv(ctx.stream, shape, layout, proj, weight, sequences, conv_state, out);
  }
}

void gated_delta_rule(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView qkv,
                      TensorView proj, TensorView A_log, TensorView dt_bias, const GdnSequences& sequences,
                      TensorView temporal, TensorView replay, TensorView out) {
  const char* op = "gated_delta_rule";
  check_gdn_shape(op, shape);
  check_gdn_sequences(op, sequences, ctx);
  check_gdn_activation(op, "qkv", qkv, ctx, {kAnySize, shape.conv_dim()});
  check_tensor(op, "proj", proj, ctx, {qkv.dtype}, {qkv.shape[0], kAnySize});
  check_gdn_layout(op, shape, layout, proj.shape[1]);
  check_contiguous(op, "A_log", A_log, ctx, {DType::f32}, {shape.num_value_heads});
  check_contiguous(op, "dt_bias", dt_bias, ctx, {DType::f32}, {shape.num_value_heads});
  check_gdn_temporal(op, temporal, shape, ctx);
  check_gdn_replay(op, replay, sequences, shape, ctx);
  check_contiguous(op, "out", out, ctx, {qkv.dtype}, {qkv.shape[0], shape.num_value_heads, shape.value_head_dim});
  if (sequences.state_indices.shape[0] == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::gated_delta_rule(threads_of(op, ctx), shape, layout, qkv, proj, A_log, dt_bias, sequences, temporal,
                                   replay, out);
    case DeviceType::cuda:
      return cuda::gated_delta_rule(ctx.stream, shape, layout, qkv, proj, A_log, dt_bias, sequences, temporal, replay,
                                    out);
  }
}

}  // namespace deltaic::ops

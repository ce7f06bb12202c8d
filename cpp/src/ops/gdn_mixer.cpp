#include "cpp/src/ops/gdn_mixer.h"

#include "cpp/src/ops/gdn_checks.h"

namespace deltaic::ops {

std::size_t gdn_mixer_workspace_bytes(Device device, const GdnShape& shape, DType dtype, std::int64_t num_tokens,
                                      std::int64_t num_seqs, std::int64_t num_verified) {
  if (device.type == DeviceType::cpu) return cpu::gdn_mixer_workspace_bytes(shape, num_tokens);
  return cuda::gdn_mixer_workspace_bytes(shape, dtype, num_tokens, num_seqs, num_verified);
}

void gdn_mixer(const Context& ctx, const GdnMixerArgs& args) {
  const char* op = "gdn_mixer";
  const GdnShape& shape = args.shape;
  const std::int64_t num_tokens = args.proj.shape[0];
  check_gdn_shape(op, shape);
  check_gdn_sequences(op, args.sequences, ctx);
  const std::int64_t num_seqs = args.sequences.state_indices.shape[0];
  DELTAIC_CHECK(args.sequences.num_decodes >= 0 && args.sequences.num_decodes <= num_seqs &&
                    args.sequences.num_decodes <= num_tokens,
                op, ": num_decodes is ", args.sequences.num_decodes, ", there are ", num_seqs, " sequences and ",
                num_tokens, " tokens");
  check_gdn_activation(op, "proj", args.proj, ctx, {kAnySize, kAnySize});
  check_gdn_layout(op, shape, args.layout, args.proj.shape[1]);
  check_contiguous(op, "conv_weight", args.conv_weight, ctx, {DType::f32}, {shape.conv_dim(), shape.conv_kernel});
  check_contiguous(op, "A_log", args.A_log, ctx, {DType::f32}, {shape.num_value_heads});
  check_contiguous(op, "dt_bias", args.dt_bias, ctx, {DType::f32}, {shape.num_value_heads});
  check_contiguous(op, "norm_weight", args.norm_weight, ctx, {DType::f32}, {shape.value_head_dim});
  check_gdn_conv_state(op, args.conv_state, shape, args.sequences.num_draft_tokens, ctx);
  check_gdn_temporal(op, args.temporal, shape, ctx);
  check_gdn_replay(op, args.replay, args.sequences, shape, ctx);
  check_contiguous(op, "out", args.out, ctx, {args.proj.dtype},
                   {num_tokens, shape.num_value_heads, shape.value_head_dim});
  const auto num_bytes = static_cast<std::int64_t>(gdn_mixer_workspace_bytes(
      ctx.device, shape, args.proj.dtype, num_tokens, num_seqs, args.sequences.num_verified()));
  check_contiguous(op, "workspace", args.workspace, ctx, {DType::u8}, {kAnySize});
  DELTAIC_CHECK(args.workspace.shape[0] >= num_bytes, op, ": the workspace has ", args.workspace.shape[0], " bytes, ",
                num_tokens, " tokens of ", num_seqs, " sequences need ", num_bytes);
  if (num_seqs == 0 || num_tokens == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::gdn_mixer(threads_of(op, ctx), args);
    case DeviceType::cuda:
      return cuda::gdn_mixer(ctx.stream, args);
  }
}

}  // namespace deltaic::ops

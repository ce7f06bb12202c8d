#include "cpp/src/ops/gdn_checks.h"

namespace deltaic::ops {

void check_gdn_shape(const char* op, const GdnShape& shape) {
  DELTAIC_CHECK(
      shape.num_key_heads > 0 && shape.num_value_heads > 0 && shape.num_value_heads % shape.num_key_heads == 0, op,
      ": ", shape.num_value_heads, " value heads do not divide into ", shape.num_key_heads, " key heads");
  DELTAIC_CHECK(shape.key_head_dim > 0 && shape.value_head_dim > 0 && shape.conv_kernel > 0, op,
                ": key_head_dim, value_head_dim and conv_kernel are ", shape.key_head_dim, ", ", shape.value_head_dim,
                ", ", shape.conv_kernel, "; they must be positive");
}

void check_gdn_sequences(const char* op, const GdnSequences& sequences, const Context& ctx) {
  check_contiguous(op, "query_start_loc", sequences.query_start_loc, ctx, {DType::i32}, {kAnySize});
  const std::int64_t num_seqs = sequences.query_start_loc.shape[0] - 1;
  const TensorView& indices = sequences.state_indices;
  DELTAIC_CHECK(indices.dtype == DType::i32 && indices.rank == 1 && indices.shape[0] == num_seqs, op,
                ": state_indices must be i32 with ", num_seqs, " elements");
  check_contiguous(op, "has_initial_state", sequences.has_initial_state, ctx, {DType::u8}, {num_seqs});
  DELTAIC_CHECK(sequences.num_draft_tokens >= 0, op, ": num_draft_tokens is ", sequences.num_draft_tokens);
  if (!sequences.has_drafts()) return;
  check_contiguous(op, "num_accepted", sequences.num_accepted, ctx, {DType::i32}, {num_seqs});
  if (sequences.has_snapshots()) {
    check_contiguous(op, "snapshot_slots", sequences.snapshot_slots, ctx, {DType::i32}, {num_seqs});
    check_contiguous(op, "snapshot_offsets", sequences.snapshot_offsets, ctx, {DType::i32}, {num_seqs});
  }
}

void check_gdn_layout(const char* op, const GdnShape& s, const GdnProjectionLayout& l, std::int64_t row) {
  const std::int64_t last_group = s.num_key_heads - 1, r = s.heads_per_group();
  const auto check = [&](const char* field, std::int64_t begin, std::int64_t stride, std::int64_t size) {
    DELTAIC_CHECK(begin >= 0 && stride >= 0 && begin + last_group * stride + size <= row, op, ": layout.", field,
                  " reaches element ", begin + last_group * stride + size, " of a row of ", row);
  };
  check("q", l.q, l.q_stride, s.key_head_dim);
  check("k", l.k, l.k_stride, s.key_head_dim);
  check("v", l.v, l.v_group_stride, r * s.value_head_dim);
  check("z", l.z, l.z_group_stride, r * s.value_head_dim);
  check("b", l.b, l.b_group_stride, r);
  check("a", l.a, l.a_group_stride, r);
}

void check_gdn_activation(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                          std::initializer_list<std::int64_t> shape) {
  if (ctx.device.type == DeviceType::cpu) return check_tensor(op, name, tensor, ctx, {DType::f32}, shape);
  check_tensor(op, name, tensor, ctx, {DType::f32, DType::f16, DType::bf16}, shape);
}

void check_gdn_conv_state(const char* op, const TensorView& conv_state, const GdnShape& shape, int num_draft_tokens,
                          const Context& ctx) {
  check_tensor(op, "conv_state", conv_state, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, shape.conv_dim(), kAnySize});
  const int num_needed = shape.conv_kernel - 1 + num_draft_tokens;
  DELTAIC_CHECK(conv_state.shape[2] >= num_needed, op, ": conv_state keeps ", conv_state.shape[2],
                " inputs, conv_kernel ", shape.conv_kernel, " with ", num_draft_tokens, " draft tokens needs ",
                num_needed);
}

void check_gdn_temporal(const char* op, const TensorView& temporal, const GdnShape& shape, const Context& ctx) {
  check_tensor(op, "temporal", temporal, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, shape.num_value_heads, shape.value_head_dim, shape.key_head_dim});
  DELTAIC_CHECK(temporal.stride[2] == shape.key_head_dim, op, ": the rows of a head in temporal are ",
                temporal.stride[2], " apart, they must be contiguous");
}

void check_gdn_replay(const char* op, const TensorView& replay, const GdnSequences& sequences, const GdnShape& shape,
                      const Context& ctx) {
  if (!sequences.has_drafts()) return;
  check_tensor(op, "replay", replay, ctx, {DType::f32}, {kAnySize, kAnySize, shape.replay_size()});
  DELTAIC_CHECK(replay.shape[1] > sequences.num_draft_tokens, op, ": replay has rows of ", replay.shape[1],
                " tokens a slot, ", sequences.num_draft_tokens, " draft tokens need ", sequences.num_draft_tokens + 1);
  DELTAIC_CHECK(replay.stride[1] == shape.replay_size(), op, ": the rows of a slot in replay are ", replay.stride[1],
                " apart, they must be contiguous");
}

}  // namespace deltaic::ops

#include "cpp/src/ops/gated_delta_net.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {
namespace {

void check_shape(const char* op, const GdnShape& shape) {
  DELTAIC_CHECK(
      shape.num_key_heads > 0 && shape.num_value_heads > 0 && shape.num_value_heads % shape.num_key_heads == 0, op,
      ": ", shape.num_value_heads, " value heads do not divide into ", shape.num_key_heads, " key heads");
  DELTAIC_CHECK(shape.key_head_dim > 0 && shape.value_head_dim > 0 && shape.conv_kernel > 0, op,
                ": key_head_dim, value_head_dim and conv_kernel are ", shape.key_head_dim, ", ", shape.value_head_dim,
                ", ", shape.conv_kernel, "; they must be positive");
}

void check_sequences(const char* op, const GdnSequences& sequences, const Context& ctx) {
  check_contiguous(op, "query_start_loc", sequences.query_start_loc, ctx, {DType::i32}, {kAnySize});
  const std::int64_t num_seqs = sequences.query_start_loc.shape[0] - 1;
  const TensorView& indices = sequences.state_indices;
  DELTAIC_CHECK(indices.dtype == DType::i32 && indices.rank == 1 && indices.shape[0] == num_seqs, op,
                ": state_indices must be i32 with ", num_seqs, " elements");
  check_contiguous(op, "has_initial_state", sequences.has_initial_state, ctx, {DType::u8}, {num_seqs});
}

// The last element of a row of proj that the layout reaches.
void check_layout(const char* op, const GdnShape& s, const GdnProjectionLayout& l, std::int64_t row) {
  const std::int64_t last_group = s.num_key_heads - 1, r = s.heads_per_group();
  const auto check = [&](const char* field, std::int64_t begin, std::int64_t stride, std::int64_t size) {
    DELTAIC_CHECK(begin >= 0 && stride >= 0 && begin + last_group * stride + size <= row, op, ": layout.", field,
                  " reaches element ", begin + last_group * stride + size, " of a row of ", row);
  };
  check("q", l.q, l.q_stride, s.key_head_dim);
  check("k", l.k, l.k_stride, s.key_head_dim);
  check("v", l.v, l.v_group_stride, r * s.value_head_dim);
  check("b", l.b, l.b_group_stride, r);
  check("a", l.a, l.a_group_stride, r);
}

}  // namespace

void causal_conv(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView proj,
                 TensorView weight, const GdnSequences& sequences, TensorView conv_state, TensorView out) {
  const char* op = "causal_conv";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_shape(op, shape);
  check_sequences(op, sequences, ctx);
  check_tensor(op, "proj", proj, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_layout(op, shape, layout, proj.shape[1]);
  check_contiguous(op, "weight", weight, ctx, {DType::f32}, {shape.conv_dim(), shape.conv_kernel});
  check_tensor(op, "conv_state", conv_state, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, shape.conv_dim(), kAnySize});
  DELTAIC_CHECK(conv_state.shape[2] >= shape.conv_kernel - 1, op, ": conv_state keeps ", conv_state.shape[2],
                " inputs, conv_kernel ", shape.conv_kernel, " needs ", shape.conv_kernel - 1);
  check_contiguous(op, "out", out, ctx, {DType::f32}, {proj.shape[0], shape.conv_dim()});
  if (sequences.state_indices.shape[0] == 0) return;
  cpu::causal_conv(threads_of(op, ctx), shape, layout, proj, weight, sequences, conv_state, out);
}

void gated_delta_rule(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView qkv,
                      TensorView proj, TensorView A_log, TensorView dt_bias, const GdnSequences& sequences,
                      TensorView temporal, TensorView out) {
  const char* op = "gated_delta_rule";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_shape(op, shape);
  check_sequences(op, sequences, ctx);
  check_tensor(op, "qkv", qkv, ctx, {DType::f32}, {kAnySize, shape.conv_dim()});
  check_tensor(op, "proj", proj, ctx, {DType::f32}, {qkv.shape[0], kAnySize});
  check_layout(op, shape, layout, proj.shape[1]);
  check_contiguous(op, "A_log", A_log, ctx, {DType::f32}, {shape.num_value_heads});
  check_contiguous(op, "dt_bias", dt_bias, ctx, {DType::f32}, {shape.num_value_heads});
  check_tensor(op, "temporal", temporal, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, shape.num_value_heads, shape.value_head_dim, shape.key_head_dim});
  DELTAIC_CHECK(temporal.stride[2] == shape.key_head_dim, op, ": the rows of a head in temporal are ",
                temporal.stride[2], " apart, they must be contiguous");
  check_contiguous(op, "out", out, ctx, {DType::f32}, {qkv.shape[0], shape.num_value_heads, shape.value_head_dim});
  if (sequences.state_indices.shape[0] == 0) return;
  cpu::gated_delta_rule(threads_of(op, ctx), shape, layout, qkv, proj, A_log, dt_bias, sequences, temporal, out);
}

}  // namespace deltaic::ops

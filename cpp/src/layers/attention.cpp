#include "cpp/src/layers/attention.h"

#include <cmath>

#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/paged_attention.h"

namespace deltaic {

Attention::Buffers Attention::take_buffers(Workspace& workspace, std::int64_t num_tokens) const {
  const std::int64_t q_size = std::int64_t{num_heads} * head_dim, kv_size = std::int64_t{num_kv_heads} * head_dim;
  return {.q = workspace.take(DType::f32, {num_tokens, output_gate ? 2 * q_size : q_size}),
          .k = workspace.take(DType::f32, {num_tokens, kv_size}),
          .v = workspace.take(DType::f32, {num_tokens, kv_size}),
          .out = workspace.take(DType::f32, {num_tokens, q_size})};
}

void Attention::forward(const ops::Context& ctx, TensorView x, const AttentionStep& step, TensorView k_cache,
                        TensorView v_cache, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, x.shape[0]);
  ops::linear(ctx, x, q_proj, {.bias = q_bias.view()}, buffers.q);
  ops::linear(ctx, x, k_proj, {.bias = k_bias.view()}, buffers.k);
  ops::linear(ctx, x, v_proj, {.bias = v_bias.view()}, buffers.v);

  TensorView q = as_heads(buffers.q, num_heads, output_gate ? 2 * head_dim : head_dim);
  TensorView gate = q;
  q.shape[2] = gate.shape[2] = head_dim;
  gate.data = static_cast<float*>(q.data) + head_dim;  // read with output_gate alone
  ops::qk_norm_rope(ctx, {.q = q,
                          .k = as_heads(buffers.k, num_kv_heads, head_dim),
                          .v = as_heads(buffers.v, num_kv_heads, head_dim),
                          .q_norm_weight = q_norm.view(),
                          .k_norm_weight = k_norm.view(),
                          .eps = eps,
                          .rotary = step.rotary,
                          .positions = step.positions,
                          .slot_mapping = step.slot_mapping,
                          .k_cache = k_cache,
                          .v_cache = v_cache});
  const TensorView out = as_heads(buffers.out, num_heads, head_dim);
  ops::paged_attention(ctx, {.q = q,
                             .k_cache = k_cache,
                             .v_cache = v_cache,
                             .block_table = step.block_table,
                             .seq_lens = step.seq_lens,
                             .query_start_loc = step.query_start_loc,
                             .scale = 1.0F / std::sqrt(static_cast<float>(head_dim)),
                             .out = out});
  if (output_gate) ops::sigmoid_mul(ctx, gate, out);
  ops::linear(ctx, buffers.out, o_proj, {.bias = o_bias.view(), .accumulate = true}, y);
}

}  // namespace deltaic

#include "cpp/src/layers/attention.h"

#include <cmath>

#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/paged_attention.h"

namespace deltaic {

Attention::Buffers Attention::take_buffers(Workspace& workspace, const StepShape& shape) const {
  std::size_t partial_bytes = 0;
  if (shape.device.type == DeviceType::cuda && shape.num_decodes > 0)
    partial_bytes = ops::paged_attention_workspace_bytes(shape.num_decodes, shape.max_decode_query_len,
                                                         shape.max_seq_len, num_heads, head_dim);
  return {.qkv = workspace.take(shape.dtype, {shape.num_tokens, qkv_proj.row_size}),
          .out = workspace.take(shape.dtype, {shape.num_tokens, std::int64_t{num_heads} * head_dim}),
          .partial = workspace.take(DType::u8, {static_cast<std::int64_t>(partial_bytes)})};
}

void Attention::forward(const ops::Context& ctx, LayerInput& input, const StepShape& shape, const AttentionStep& step,
                        TensorView k_cache, TensorView v_cache, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, shape);
  qkv_proj.forward(ctx, input, buffers.qkv);

  const std::int64_t q_dim = output_gate ? 2 * head_dim : head_dim;  // columns of a head
  const std::int64_t q_size = num_heads * q_dim, kv_size = std::int64_t{num_kv_heads} * head_dim;
  const TensorView q_and_gate = as_heads(columns(buffers.qkv, 0, q_size), num_heads, q_dim);
  const TensorView q = part_of_heads(q_and_gate, 0, head_dim);
  ops::qk_norm_rope(ctx, {.q = q,
                          .k = as_heads(columns(buffers.qkv, q_size, kv_size), num_kv_heads, head_dim),
                          .v = as_heads(columns(buffers.qkv, q_size + kv_size, kv_size), num_kv_heads, head_dim),
                          .q_norm_weight = q_norm.view(),
                          .k_norm_weight = k_norm.view(),
                          .eps = eps,
                          .rotary = step.rotary,
                          .positions = step.positions,
                          .slot_mapping = step.slot_mapping,
                          .k_cache = k_cache,
                          .v_cache = v_cache});
  ops::paged_attention(ctx, {.q = q,
                             .k_cache = k_cache,
                             .v_cache = v_cache,
                             .block_table = step.block_table,
                             .seq_lens = step.seq_lens,
                             .query_start_loc = step.query_start_loc,
                             .scale = 1.0F / std::sqrt(static_cast<float>(head_dim)),
                             .gate = output_gate ? part_of_heads(q_and_gate, head_dim, head_dim) : TensorView{},
                             .out = as_heads(buffers.out, num_heads, head_dim),
                             .num_decodes = static_cast<int>(shape.num_decodes),
                             .max_decode_query_len = static_cast<int>(shape.max_decode_query_len),
                             .max_query_len = step.max_query_len,
                             .max_seq_len = static_cast<int>(shape.max_seq_len),
                             .workspace = buffers.partial});
  ops::linear(ctx, buffers.out, o_proj, {.bias = o_bias.view(), .accumulate = true}, y);
}

}  // namespace deltaic

#include <algorithm>

#include <deltaic/config.h>

namespace deltaic {

std::string_view name(Architecture architecture) {
  switch (architecture) {
    case Architecture::qwen3:
      return "qwen3";
    case Architecture::qwen3_moe:
      return "qwen3_moe";
    case Architecture::qwen3_next:
      return "qwen3_next";
    case Architecture::qwen3_5:
      return "qwen3_5";
    case Architecture::qwen3_5_moe:
      return "qwen3_5_moe";
  }
  return "?";
}

int ModelConfig::num_layers_of(LayerKind kind) const {
  return static_cast<int>(std::count(layer_kinds.begin(), layer_kinds.end(), kind));
}

std::int64_t ModelConfig::num_parameters() const {
  const std::int64_t hidden = hidden_size;
  const std::int64_t q_rows = std::int64_t{num_heads} * head_dim * (attention_output_gate ? 2 : 1);
  const std::int64_t kv_rows = 2 * std::int64_t{num_kv_heads} * head_dim;
  const std::int64_t o_columns = std::int64_t{num_heads} * head_dim;
  const std::int64_t attention =
      (q_rows + kv_rows + o_columns) * hidden + 2 * head_dim + (attention_bias ? q_rows + kv_rows + hidden : 0);

  const std::int64_t value_dim = std::int64_t{linear_num_value_heads} * linear_value_head_dim;
  const std::int64_t projections = conv_dim() + value_dim + 2 * linear_num_value_heads;
  const std::int64_t gdn = projections * hidden + std::int64_t{conv_dim()} * linear_conv_kernel_dim +
                           2 * linear_num_value_heads + linear_value_head_dim + value_dim * hidden;

  const std::int64_t mlp = 3 * hidden * intermediate_size;
  const std::int64_t shared =
      shared_expert_intermediate_size > 0 ? 3 * hidden * shared_expert_intermediate_size + hidden : 0;
  const std::int64_t moe = num_experts * (hidden + 3 * hidden * moe_intermediate_size) + shared;

  std::int64_t total = (tie_word_embeddings ? 1 : 2) * std::int64_t{vocab_size} * hidden + hidden;
  for (int i = 0; i < num_layers; ++i) {
    total += 2 * hidden;
    total += layer_kinds[i] == LayerKind::full_attention ? attention : gdn;
    total += is_moe_layer[i] ? moe : mlp;
  }
  return total;
}

}  // namespace deltaic

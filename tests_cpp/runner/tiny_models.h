#pragma once

#include <cmath>
#include <list>
#include <random>
#include <string>
#include <vector>

#include <deltaic/runner.h>

namespace deltaic::test {

// A random model of a few kilobytes: its config and its tensors under checkpoint names. Moving it keeps the tensors
// where they are.
struct TinyModel {
  ModelConfig config;
  TensorMap tensors;
  std::list<std::vector<float>> storage;

  std::vector<float>& values(const std::string& name) {
    const void* data = tensors.at(name).data;
    for (auto& values : storage)
      if (values.data() == data) return values;
    std::abort();
  }
};

namespace detail {

class TinyModelMaker {
 public:
  TinyModelMaker(Architecture architecture, std::vector<LayerKind> layer_kinds, unsigned seed) : rng_(seed) {
    ModelConfig& config = model_.config;
    config.architecture = architecture;
    config.vocab_size = 61;
    config.hidden_size = 32;
    config.num_layers = static_cast<int>(layer_kinds.size());
    config.layer_kinds = std::move(layer_kinds);
    config.max_position_embeddings = 4096;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.head_dim = 8;
    config.rotary_dim = config.is_hybrid_family() ? 4 : 8;
    config.attention_output_gate = config.is_hybrid_family();
    const bool is_moe = architecture == Architecture::qwen3_moe || architecture == Architecture::qwen3_next ||
                        architecture == Architecture::qwen3_5_moe;
    config.is_moe_layer.assign(config.layer_kinds.size(), is_moe);
    if (is_moe) {
      config.num_experts = 4;
      config.num_experts_per_token = 2;
      config.moe_intermediate_size = 16;
      config.shared_expert_intermediate_size = config.is_hybrid_family() ? 16 : 0;
      config.norm_topk_prob = true;
    } else {
      config.intermediate_size = 40;
    }
    if (config.num_layers_of(LayerKind::linear_attention) > 0) {
      config.linear_num_key_heads = 1;
      config.linear_num_value_heads = 2;
      config.linear_key_head_dim = 8;
      config.linear_value_head_dim = 8;
      config.linear_conv_kernel_dim = 4;
    }
  }

  TinyModel make() {
    const ModelConfig& config = model_.config;
    const std::int64_t hidden = config.hidden_size;
    add("model.embed_tokens.weight", {config.vocab_size, hidden}, 1.0F);
    add("lm_head.weight", {config.vocab_size, hidden}, 1.0F);
    add_norm("model.norm.weight", hidden);
    for (int i = 0; i < config.num_layers; ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      add_norm(prefix + "input_layernorm.weight", hidden);
      add_norm(prefix + "post_attention_layernorm.weight", hidden);
      if (config.layer_kinds[static_cast<std::size_t>(i)] == LayerKind::full_attention)
        add_attention(prefix + "self_attn.");
      else
        add_gated_delta_net(prefix + "linear_attn.");
      if (config.is_moe_layer[static_cast<std::size_t>(i)])
        add_moe(prefix + "mlp.");
      else
        add_mlp(prefix + "mlp.", config.intermediate_size);
    }
    return std::move(model_);
  }

 private:
  void add(const std::string& name, std::vector<std::int64_t> shape, float scale, float mean = 0.0F) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::normal_distribution<float> normal(mean, scale);
    auto& values = model_.storage.emplace_back(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(rng_);
    model_.tensors.emplace(name, make_view(values.data(), DType::f32, shape));
  }
  void add_matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    add(name, {rows, columns}, 1.5F / std::sqrt(static_cast<float>(columns)));
  }
  void add_norm(const std::string& name, std::int64_t size) {
    add(name, {size}, 0.1F, model_.config.norm_is_zero_centred() ? 0.0F : 1.0F);
  }

  void add_attention(const std::string& prefix) {
    const ModelConfig& config = model_.config;
    const std::int64_t q_size = std::int64_t{config.num_heads} * config.head_dim;
    const std::int64_t kv_size = std::int64_t{config.num_kv_heads} * config.head_dim;
    add_matrix(prefix + "q_proj.weight", config.attention_output_gate ? 2 * q_size : q_size, config.hidden_size);
    add_matrix(prefix + "k_proj.weight", kv_size, config.hidden_size);
    add_matrix(prefix + "v_proj.weight", kv_size, config.hidden_size);
    add_matrix(prefix + "o_proj.weight", config.hidden_size, q_size);
    add_norm(prefix + "q_norm.weight", config.head_dim);
    add_norm(prefix + "k_norm.weight", config.head_dim);
  }

  void add_gated_delta_net(const std::string& prefix) {
    const ModelConfig& config = model_.config;
    const std::int64_t hidden = config.hidden_size;
    const std::int64_t num_value_heads = config.linear_num_value_heads;
    const std::int64_t z_size = num_value_heads * config.linear_value_head_dim;
    if (config.architecture == Architecture::qwen3_next) {
      add_matrix(prefix + "in_proj_qkvz.weight", config.conv_dim() + z_size, hidden);
      add_matrix(prefix + "in_proj_ba.weight", 2 * num_value_heads, hidden);
    } else {
      add_matrix(prefix + "in_proj_qkv.weight", config.conv_dim(), hidden);
      add_matrix(prefix + "in_proj_z.weight", z_size, hidden);
      add_matrix(prefix + "in_proj_b.weight", num_value_heads, hidden);
      add_matrix(prefix + "in_proj_a.weight", num_value_heads, hidden);
    }
    add(prefix + "conv1d.weight", {config.conv_dim(), 1, config.linear_conv_kernel_dim}, 0.5F);
    add(prefix + "A_log", {num_value_heads}, 0.5F, -1.0F);
    add(prefix + "dt_bias", {num_value_heads}, 0.5F);
    add(prefix + "norm.weight", {config.linear_value_head_dim}, 0.1F, 1.0F);
    add_matrix(prefix + "out_proj.weight", hidden, z_size);
  }

  void add_mlp(const std::string& prefix, std::int64_t intermediate) {
    add_matrix(prefix + "gate_proj.weight", intermediate, model_.config.hidden_size);
    add_matrix(prefix + "up_proj.weight", intermediate, model_.config.hidden_size);
    add_matrix(prefix + "down_proj.weight", model_.config.hidden_size, intermediate);
  }

  void add_moe(const std::string& prefix) {
    const ModelConfig& config = model_.config;
    add_matrix(prefix + "gate.weight", config.num_experts, config.hidden_size);
    for (int expert = 0; expert < config.num_experts; ++expert)
      add_mlp(prefix + "experts." + std::to_string(expert) + ".", config.moe_intermediate_size);
    if (config.shared_expert_intermediate_size == 0) return;
    add_mlp(prefix + "shared_expert.", config.shared_expert_intermediate_size);
    add_matrix(prefix + "shared_expert_gate.weight", 1, config.hidden_size);
  }

  TinyModel model_;
  std::mt19937 rng_;
};

}  // namespace detail

// Dense, two GDN layers around a full-attention layer.
inline TinyModel tiny_qwen3_5(unsigned seed = 1) {
  using enum LayerKind;
  return detail::TinyModelMaker(Architecture::qwen3_5, {linear_attention, full_attention, linear_attention}, seed)
      .make();
}
// Mixture of experts, one GDN and one full-attention layer.
inline TinyModel tiny_qwen3_next(unsigned seed = 2) {
  using enum LayerKind;
  return detail::TinyModelMaker(Architecture::qwen3_next, {linear_attention, full_attention}, seed).make();
}
// Full attention alone.
inline TinyModel tiny_qwen3(unsigned seed = 3) {
  using enum LayerKind;
  return detail::TinyModelMaker(Architecture::qwen3, {full_attention, full_attention}, seed).make();
}

}  // namespace deltaic::test

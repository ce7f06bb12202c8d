#include "tests_cpp/support/tiny_model.h"

#include <numeric>
#include <random>

namespace deltaic::test {

namespace {

class Builder {
 public:
  Builder(TinyModel& model, const TinyModelOptions& options)
      : model_(model), c_(model.config), options_(options), random_(options.seed) {}

  void build() {
    uniform(options_.prefix + "embed_tokens.weight", {c_.vocab_size, c_.hidden_size}, 1.0F);
    norm(options_.prefix + "norm.weight", c_.hidden_size);
    if (!options_.tied) uniform("lm_head.weight", {c_.vocab_size, c_.hidden_size}, 1.0F);
    for (int i = 0; i < c_.num_layers; ++i)
      layer(options_.prefix + "layers." + std::to_string(i) + ".", c_.layer_kinds[i], c_.is_moe_layer[i]);
    if (options_.mtp) mtp();
  }

 private:
  void uniform(const std::string& name, std::vector<std::int64_t> shape, float scale, float centre = 0.0F) {
    std::uniform_real_distribution<float> distribution(centre - scale, centre + scale);
    const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = distribution(random_);
    model_.set(name, std::move(shape), std::move(values));
  }
  void matrix(const std::string& name, std::int64_t rows, std::int64_t columns) {
    uniform(name, {rows, columns}, 0.3F);
  }
  void norm(const std::string& name, std::int64_t size) {
    uniform(name, {size}, 0.3F, c_.norm_is_zero_centred() ? 0.0F : 1.0F);
  }

  void mtp() {
    norm("mtp.pre_fc_norm_embedding.weight", c_.hidden_size);
    norm("mtp.pre_fc_norm_hidden.weight", c_.hidden_size);
    norm("mtp.norm.weight", c_.hidden_size);
    matrix("mtp.fc.weight", c_.hidden_size, 2 * c_.hidden_size);
    layer("mtp.layers.0.", LayerKind::full_attention, c_.is_moe_layer[0]);
  }

  void layer(const std::string& p, LayerKind kind, bool is_moe) {
    norm(p + "input_layernorm.weight", c_.hidden_size);
    norm(p + "post_attention_layernorm.weight", c_.hidden_size);
    if (kind == LayerKind::full_attention)
      attention(p + "self_attn.");
    else
      linear_attention(p + "linear_attn.");
    if (is_moe)
      moe(p + "mlp.");
    else
      mlp(p + "mlp.", c_.intermediate_size);
  }

  void attention(const std::string& p) {
    const int q = c_.num_heads * c_.head_dim, kv = c_.num_kv_heads * c_.head_dim;
    const int q_rows = c_.attention_output_gate ? 2 * q : q;
    matrix(p + "q_proj.weight", q_rows, c_.hidden_size);
    matrix(p + "k_proj.weight", kv, c_.hidden_size);
    matrix(p + "v_proj.weight", kv, c_.hidden_size);
    matrix(p + "o_proj.weight", c_.hidden_size, q);
    norm(p + "q_norm.weight", c_.head_dim);
    norm(p + "k_norm.weight", c_.head_dim);
    if (!c_.attention_bias) return;
    uniform(p + "q_proj.bias", {q_rows}, 0.5F);
    uniform(p + "k_proj.bias", {kv}, 0.5F);
    uniform(p + "v_proj.bias", {kv}, 0.5F);
    uniform(p + "o_proj.bias", {c_.hidden_size}, 0.5F);
  }

  void linear_attention(const std::string& p) {
    const int values = c_.linear_num_value_heads * c_.linear_value_head_dim;
    if (c_.architecture == Architecture::qwen3_next) {
      matrix(p + "in_proj_qkvz.weight", c_.conv_dim() + values, c_.hidden_size);
      matrix(p + "in_proj_ba.weight", 2 * c_.linear_num_value_heads, c_.hidden_size);
    } else {
      matrix(p + "in_proj_qkv.weight", c_.conv_dim(), c_.hidden_size);
      matrix(p + "in_proj_z.weight", values, c_.hidden_size);
      matrix(p + "in_proj_b.weight", c_.linear_num_value_heads, c_.hidden_size);
      matrix(p + "in_proj_a.weight", c_.linear_num_value_heads, c_.hidden_size);
    }
    uniform(p + "conv1d.weight", {c_.conv_dim(), 1, c_.linear_conv_kernel_dim}, 0.5F);
    uniform(p + "A_log", {c_.linear_num_value_heads}, 2.0F);
    uniform(p + "dt_bias", {c_.linear_num_value_heads}, 1.0F);
    uniform(p + "norm.weight", {c_.linear_value_head_dim}, 0.3F, 1.0F);
    matrix(p + "out_proj.weight", c_.hidden_size, values);
  }

  void mlp(const std::string& p, int intermediate) {
    matrix(p + "gate_proj.weight", intermediate, c_.hidden_size);
    matrix(p + "up_proj.weight", intermediate, c_.hidden_size);
    matrix(p + "down_proj.weight", c_.hidden_size, intermediate);
  }

  void moe(const std::string& p) {
    matrix(p + "gate.weight", c_.num_experts, c_.hidden_size);
    const int intermediate = c_.moe_intermediate_size;
    if (options_.fused_experts) {
      uniform(p + "experts.gate_up_proj", {c_.num_experts, 2 * intermediate, c_.hidden_size}, 0.3F);
      uniform(p + "experts.down_proj", {c_.num_experts, c_.hidden_size, intermediate}, 0.3F);
    } else {
      for (int e = 0; e < c_.num_experts; ++e) mlp(p + "experts." + std::to_string(e) + ".", intermediate);
    }
    if (c_.shared_expert_intermediate_size == 0) return;
    mlp(p + "shared_expert.", c_.shared_expert_intermediate_size);
    matrix(p + "shared_expert_gate.weight", 1, c_.hidden_size);
  }

  TinyModel& model_;
  const ModelConfig& c_;
  const TinyModelOptions& options_;
  std::mt19937_64 random_;
};

std::string config_json(Architecture architecture, const TinyModelOptions& options) {
  std::string json = R"({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5,
    "rope_theta": 10000000.0, "max_position_embeddings": 4096, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "model_type": ")";
  json += name(architecture);
  json += R"(", "shared_expert_intermediate_size": )" + std::to_string(options.shared_intermediate);
  json += R"(, "tie_word_embeddings": )" + std::string(options.tied ? "true" : "false");
  json += R"(, "attention_bias": )" + std::string(options.attention_bias ? "true" : "false");
  if (!options.extra_config.empty()) json += ", " + options.extra_config;
  return json + "}";
}

}  // namespace

void TinyModel::set(const std::string& name, std::vector<std::int64_t> shape, std::vector<float> values) {
  auto& owned = memory.emplace_back(std::move(values));
  tensors[name] = make_view(owned.data(), DType::f32, shape);
}

std::vector<float> TinyModel::values(const std::string& name) const {
  const TensorView& view = tensors.at(name);
  return {view.as<float>(), view.as<float>() + view.numel()};
}

TinyModel make_tiny_model(Architecture architecture, const TinyModelOptions& options) {
  TinyModel model;
  model.config = parse_model_config(config_json(architecture, options));
  Builder(model, options).build();
  return model;
}

}  // namespace deltaic::test

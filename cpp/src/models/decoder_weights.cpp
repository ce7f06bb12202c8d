#include "cpp/src/models/decoder_weights.h"

#include <algorithm>
#include <set>

#include "cpp/src/check.h"
#include "cpp/src/models/gdn_projections.h"
#include "cpp/src/models/weight_reader.h"

namespace deltaic {

namespace {

// Reads the layers of one model. The prefix of a layer's names is passed along: "layers.3.".
class LayerReader {
 public:
  LayerReader(const ModelConfig& config, WeightReader& reader)
      : config_(config), reader_(reader), hidden_(config.hidden_size) {}

  // A norm's weight as it is multiplied with: 1 + w where the family stores it so.
  Tensor norm(const std::string& name, std::int64_t size) const {
    return reader_.values(name, {size}, config_.norm_is_zero_centred() ? 1.0F : 0.0F);
  }

  DecoderLayer layer(int index) const {
    const std::string prefix = "layers." + std::to_string(index) + ".";
    DecoderLayer layer{.input_norm = norm(prefix + "input_layernorm.weight", hidden_),
                       .post_attention_norm = norm(prefix + "post_attention_layernorm.weight", hidden_),
                       .mixer = {},
                       .feed_forward = {}};
    if (config_.layer_kinds[index] == LayerKind::full_attention)
      layer.mixer = attention(prefix + "self_attn.");
    else
      layer.mixer = gated_delta_net(prefix + "linear_attn.");
    if (config_.is_moe_layer[index])
      layer.feed_forward = moe(prefix + "mlp.");
    else
      layer.feed_forward = mlp(prefix + "mlp.", config_.intermediate_size);
    return layer;
  }

 private:
  Attention attention(const std::string& prefix) const {
    const std::int64_t q_size = std::int64_t{config_.num_heads} * config_.head_dim;
    const std::int64_t kv_size = std::int64_t{config_.num_kv_heads} * config_.head_dim;
    const std::int64_t q_rows = config_.attention_output_gate ? 2 * q_size : q_size;
    Attention layer;
    layer.num_heads = config_.num_heads;
    layer.num_kv_heads = config_.num_kv_heads;
    layer.head_dim = config_.head_dim;
    layer.output_gate = config_.attention_output_gate;
    layer.eps = static_cast<float>(config_.rms_norm_eps);
    layer.q_proj = reader_.matrix(prefix + "q_proj.weight", q_rows, hidden_);
    layer.k_proj = reader_.matrix(prefix + "k_proj.weight", kv_size, hidden_);
    layer.v_proj = reader_.matrix(prefix + "v_proj.weight", kv_size, hidden_);
    layer.o_proj = reader_.matrix(prefix + "o_proj.weight", hidden_, q_size);
    if (config_.attention_bias) {
      layer.q_bias = reader_.values(prefix + "q_proj.bias", {q_rows});
      layer.k_bias = reader_.values(prefix + "k_proj.bias", {kv_size});
      layer.v_bias = reader_.values(prefix + "v_proj.bias", {kv_size});
      layer.o_bias = reader_.values(prefix + "o_proj.bias", {hidden_});
    }
    layer.q_norm = norm(prefix + "q_norm.weight", config_.head_dim);
    layer.k_norm = norm(prefix + "k_norm.weight", config_.head_dim);
    return layer;
  }

  GatedDeltaNet gated_delta_net(const std::string& prefix) const {
    GatedDeltaNet layer;
    layer.shape = {.num_key_heads = config_.linear_num_key_heads,
                   .num_value_heads = config_.linear_num_value_heads,
                   .key_head_dim = config_.linear_key_head_dim,
                   .value_head_dim = config_.linear_value_head_dim,
                   .conv_kernel = config_.linear_conv_kernel_dim};
    layer.eps = static_cast<float>(config_.rms_norm_eps);
    if (config_.architecture == Architecture::qwen3_next)
      read_qwen3_next_projections(reader_, prefix, hidden_, layer);
    else
      read_qwen3_5_projections(reader_, prefix, hidden_, layer);
    layer.conv1d = reader_.values(prefix + "conv1d.weight", {layer.shape.conv_dim(), 1, layer.shape.conv_kernel});
    layer.A_log = reader_.values(prefix + "A_log", {layer.shape.num_value_heads});
    layer.dt_bias = reader_.values(prefix + "dt_bias", {layer.shape.num_value_heads});
    layer.norm = reader_.values(prefix + "norm.weight", {layer.shape.value_head_dim});
    layer.out_proj = reader_.matrix(prefix + "out_proj.weight", hidden_,
                                    std::int64_t{layer.shape.num_value_heads} * layer.shape.value_head_dim);
    return layer;
  }

  Mlp mlp(const std::string& prefix, std::int64_t intermediate) const {
    return {.gate_proj = reader_.matrix(prefix + "gate_proj.weight", intermediate, hidden_),
            .up_proj = reader_.matrix(prefix + "up_proj.weight", intermediate, hidden_),
            .down_proj = reader_.matrix(prefix + "down_proj.weight", hidden_, intermediate)};
  }

  Moe moe(const std::string& prefix) const {
    Moe layer;
    layer.num_experts_per_token = config_.num_experts_per_token;
    layer.renormalize = config_.norm_topk_prob;
    layer.router = reader_.matrix(prefix + "gate.weight", config_.num_experts, hidden_);
    layer.experts = experts(prefix + "experts.");
    if (config_.shared_expert_intermediate_size > 0) {
      layer.shared_expert = mlp(prefix + "shared_expert.", config_.shared_expert_intermediate_size);
      layer.shared_expert_gate = reader_.matrix(prefix + "shared_expert_gate.weight", 1, hidden_);
    }
    return layer;
  }

  // Either layout, by the names that are there: one tensor for all experts, or three an expert.
  ops::ExpertWeights experts(const std::string& prefix) const {
    const std::int64_t count = config_.num_experts, intermediate = config_.moe_intermediate_size;
    const bool is_fused = reader_.has(prefix + "gate_up_proj");
    ops::Weight gate_up, down;
    if (is_fused) {
      gate_up = reader_.stacked_matrices(prefix + "gate_up_proj", count, 2 * intermediate, hidden_);
      down = reader_.stacked_matrices(prefix + "down_proj", count, hidden_, intermediate);
    }
    ops::ExpertWeights result;
    for (std::int64_t i = 0; i < count; ++i) {
      if (is_fused) {
        const std::int64_t first = 2 * i * intermediate;
        result.gate.push_back(rows(gate_up, first, first + intermediate));
        result.up.push_back(rows(gate_up, first + intermediate, first + 2 * intermediate));
        result.down.push_back(rows(down, i * hidden_, (i + 1) * hidden_));
      } else {
        Mlp expert = mlp(prefix + std::to_string(i) + ".", intermediate);
        result.gate.push_back(std::move(expert.gate_proj));
        result.up.push_back(std::move(expert.up_proj));
        result.down.push_back(std::move(expert.down_proj));
      }
    }
    return result;
  }

  const ModelConfig& config_;
  WeightReader& reader_;
  std::int64_t hidden_;
};

// The embedding and the head (model-spec section 11): a head that is there is used, tied or not; tied, the one that is
// missing is the other.
void read_embedding_and_head(const ModelConfig& config, WeightReader& reader, DecoderWeights& weights) {
  constexpr std::string_view kEmbedding = "embed_tokens.weight", kHead = "lm_head.weight";
  const std::int64_t vocab = config.vocab_size, hidden = config.hidden_size;
  const bool has_embedding = reader.has(kEmbedding), has_head = reader.has(kHead);
  DELTAIC_CHECK(has_head || config.tie_word_embeddings,
                "the tensor lm_head.weight is missing, and tie_word_embeddings is false");
  if (has_embedding || !has_head || !config.tie_word_embeddings)
    weights.embedding = reader.matrix(kEmbedding, vocab, hidden);
  weights.head = has_head ? reader.matrix(kHead, vocab, hidden) : weights.embedding;
  if (!weights.embedding.is_set()) weights.embedding = weights.head;
}

int count_mtp_layers(const Checkpoint& checkpoint) {
  constexpr std::string_view kPrefix = "mtp.layers.";
  std::set<std::string> indices;
  for (const std::string& name : checkpoint.names(kPrefix))
    indices.insert(name.substr(kPrefix.size(), name.find('.', kPrefix.size()) - kPrefix.size()));
  return static_cast<int>(indices.size());
}

}  // namespace

std::shared_ptr<const DecoderWeights> load_decoder_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                           WeightPlacement placement) {
  if (placement.device.type != DeviceType::cpu) throw Unsupported("weights are loaded to the CPU alone");
  const auto num_layers = static_cast<std::size_t>(config.num_layers);
  DELTAIC_CHECK(config.layer_kinds.size() == num_layers && config.is_moe_layer.size() == num_layers, "layer_kinds has ",
                config.layer_kinds.size(), " entries and is_moe_layer ", config.is_moe_layer.size(), ", num_layers is ",
                num_layers);
  WeightReader reader(checkpoint);
  const LayerReader layers(config, reader);
  auto weights = std::make_shared<DecoderWeights>();
  weights->placement = placement;
  read_embedding_and_head(config, reader, *weights);
  for (int i = 0; i < config.num_layers; ++i) weights->layers.push_back(layers.layer(i));
  weights->final_norm = layers.norm("norm.weight", config.hidden_size);
  weights->num_mtp_layers = count_mtp_layers(checkpoint);
  weights->num_bytes = reader.num_bytes();
  return weights;
}

}  // namespace deltaic

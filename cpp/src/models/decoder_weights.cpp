#include "cpp/src/models/decoder_weights.h"

#include <algorithm>
#include <set>

#include "cpp/src/check.h"
#include "cpp/src/models/gdn_projections.h"
#include "cpp/src/models/placed_reader.h"
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

  DecoderLayer layer(const std::string& prefix, LayerKind kind, bool is_moe) const {
    DecoderLayer layer{.input_norm = norm(prefix + "input_layernorm.weight", hidden_),
                       .post_attention_norm = norm(prefix + "post_attention_layernorm.weight", hidden_),
                       .mixer = {},
                       .feed_forward = {}};
    if (kind == LayerKind::full_attention)
      layer.mixer = attention(prefix + "self_attn.");
    else
      layer.mixer = gated_delta_net(prefix + "linear_attn.");
    if (is_moe)
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
    layer.qkv_proj = reader_.projection(
        {{prefix + "q_proj.weight", q_rows}, {prefix + "k_proj.weight", kv_size}, {prefix + "v_proj.weight", kv_size}},
        hidden_);
    layer.o_proj = reader_.matrix(prefix + "o_proj.weight", hidden_, q_size);
    if (config_.attention_bias) {
      layer.qkv_proj.bias = reader_.vectors(
          {{prefix + "q_proj.bias", q_rows}, {prefix + "k_proj.bias", kv_size}, {prefix + "v_proj.bias", kv_size}});
      layer.o_bias = reader_.vectors({{prefix + "o_proj.bias", hidden_}});
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
    return {.gate_up_proj = reader_.projection(
                {{prefix + "gate_proj.weight", intermediate}, {prefix + "up_proj.weight", intermediate}}, hidden_),
            .down_proj = reader_.matrix(prefix + "down_proj.weight", hidden_, intermediate)};
  }

  Moe moe(const std::string& prefix) const {
    Moe layer;
    layer.num_experts = config_.num_experts;
    layer.num_experts_per_token = config_.num_experts_per_token;
    layer.intermediate_size = config_.moe_intermediate_size;
    layer.renormalize = config_.norm_topk_prob;
    layer.has_shared_expert = config_.shared_expert_intermediate_size > 0;
    std::vector<WeightReader::Rows> router{{prefix + "gate.weight", config_.num_experts}};
    if (layer.has_shared_expert) router.push_back({prefix + "shared_expert_gate.weight", 1});
    layer.router = reader_.projection(router, hidden_);

    const std::string shared = prefix + "shared_expert.";
    const bool is_among_experts = layer.has_shared_expert && reader_.fuses() &&
                                  config_.shared_expert_intermediate_size == config_.moe_intermediate_size;
    layer.experts = reader_.experts({.prefix = prefix + "experts.",
                                     .shared_prefix = is_among_experts ? shared : "",
                                     .count = config_.num_experts,
                                     .intermediate = config_.moe_intermediate_size,
                                     .hidden = hidden_});
    if (layer.has_shared_expert && !is_among_experts)
      layer.shared_expert = mlp(shared, config_.shared_expert_intermediate_size);
    return layer;
  }

  const ModelConfig& config_;
  WeightReader& reader_;
  std::int64_t hidden_;
};

// The embedding and the head (docs/models.md, "Embedding and head"): a head that is there is used, tied or not; tied,
// the one that is missing is the other.
void read_embedding_and_head(const ModelConfig& config, WeightReader& reader, DecoderWeights& weights) {
  const std::string kEmbedding = "embed_tokens.weight", kHead = "lm_head.weight";
  const std::int64_t vocab = config.vocab_size, hidden = config.hidden_size;
  const bool has_embedding = reader.has(kEmbedding), has_head = reader.has(kHead);
  DELTAIC_CHECK(has_head || config.tie_word_embeddings,
                "the tensor lm_head.weight is missing, and tie_word_embeddings is false");
  if (has_embedding || !has_head || !config.tie_word_embeddings)
    weights.embedding = reader.matrix(kEmbedding, vocab, hidden);
  weights.head = has_head ? reader.matrix(kHead, vocab, hidden) : weights.embedding;
  if (!weights.embedding.is_set()) weights.embedding = weights.head;
}

std::shared_ptr<DecoderWeights> read_weights(const ModelConfig& config, WeightReader& reader,
                                             WeightPlacement placement) {
  const auto num_layers = static_cast<std::size_t>(config.num_layers);
  DELTAIC_CHECK(config.layer_kinds.size() == num_layers && config.is_moe_layer.size() == num_layers, "layer_kinds has ",
                config.layer_kinds.size(), " entries and is_moe_layer ", config.is_moe_layer.size(), ", num_layers is ",
                num_layers);
  const LayerReader layers(config, reader);
  auto weights = std::make_shared<DecoderWeights>();
  weights->placement = placement;
  read_embedding_and_head(config, reader, *weights);
  for (int i = 0; i < config.num_layers; ++i)
    weights->layers.push_back(
        layers.layer("layers." + std::to_string(i) + ".", config.layer_kinds[i], config.is_moe_layer[i]));
  weights->final_norm = layers.norm("norm.weight", config.hidden_size);
  weights->num_bytes = reader.num_bytes();
  return weights;
}

std::shared_ptr<MtpWeights> read_mtp_weights(const ModelConfig& config, WeightReader& reader,
                                             const DecoderWeights& target) {
  const LayerReader layers(config, reader);
  const std::int64_t hidden = config.hidden_size;
  auto weights = std::make_shared<MtpWeights>();
  weights->embedding_norm = layers.norm("mtp.pre_fc_norm_embedding.weight", hidden);
  weights->hidden_norm = layers.norm("mtp.pre_fc_norm_hidden.weight", hidden);
  weights->fc = reader.matrix("mtp.fc.weight", hidden, 2 * hidden);
  weights->block.placement = target.placement;
  weights->block.embedding = target.embedding;
  weights->block.head = target.head;
  weights->block.layers.push_back(layers.layer("mtp.layers.0.", LayerKind::full_attention, config.num_experts > 0));
  weights->block.final_norm = layers.norm("mtp.norm.weight", hidden);
  weights->block.num_bytes = reader.num_bytes();
  return weights;
}

}  // namespace

std::shared_ptr<const DecoderWeights> load_decoder_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                           WeightPlacement placement) {
  std::shared_ptr<DecoderWeights> weights;
  if (placement.device.type == DeviceType::cpu) {
    ViewReader reader(checkpoint);
    weights = read_weights(config, reader, placement);
  } else {
    const auto source = upload_from(checkpoint, placement.device);
    PlacedReader reader(*source, placement);
    weights = read_weights(config, reader, placement);
    source->finish();
  }
  weights->num_mtp_layers = count_mtp_layers(checkpoint);
  return weights;
}

std::shared_ptr<const DecoderWeights> make_dummy_weights(const ModelConfig& config, WeightPlacement placement,
                                                         std::uint64_t seed) {
  const auto source = random_weights(config.tie_word_embeddings, seed);
  PlacedReader reader(*source, placement);
  const auto weights = read_weights(config, reader, placement);
  source->finish();
  return weights;
}

std::shared_ptr<const MtpWeights> load_mtp_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                   const DecoderWeights& target) {
  if (target.num_mtp_layers != 1)
    throw Unsupported(detail::concat("the checkpoint has ", target.num_mtp_layers,
                                     " layers of a draft module (mtp.layers.*); drafting needs 1"));
  if (target.placement.device.type == DeviceType::cpu) {
    ViewReader reader(checkpoint);
    return read_mtp_weights(config, reader, target);
  }
  const auto source = upload_from(checkpoint, target.placement.device);
  PlacedReader reader(*source, target.placement);
  auto weights = read_mtp_weights(config, reader, target);
  source->finish();
  return weights;
}

std::shared_ptr<const MtpWeights> make_dummy_mtp_weights(const ModelConfig& config, const DecoderWeights& target,
                                                         std::uint64_t seed) {
  if (config.num_mtp_layers != 1)
    throw Unsupported(
        detail::concat("config.json says mtp_num_hidden_layers ", config.num_mtp_layers, ": drafting needs 1"));
  const auto source = random_weights(config.tie_word_embeddings, seed);
  PlacedReader reader(*source, target.placement);
  auto weights = read_mtp_weights(config, reader, target);
  source->finish();
  return weights;
}

int count_mtp_layers(const Checkpoint& checkpoint) {
  constexpr std::string_view kPrefix = "mtp.layers.";
  std::set<std::string> indices;
  for (const std::string& name : checkpoint.names(kPrefix))
    indices.insert(name.substr(kPrefix.size(), name.find('.', kPrefix.size()) - kPrefix.size()));
  return static_cast<int>(indices.size());
}

int count_draft_layers(const std::filesystem::path& checkpoint) {
  return count_mtp_layers(Checkpoint::open(checkpoint));
}

}  // namespace deltaic

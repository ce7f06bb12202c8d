#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include <deltaic/config.h>
#include <nlohmann/json.hpp>

#include "cpp/src/check.h"
#include "cpp/src/loader/json_fields.h"
#include "cpp/src/loader/rope_config.h"

namespace deltaic {

namespace {

using nlohmann::json;

// What an absent key stands for (docs/models.md, "Configuration").
struct FamilyDefaults {
  int vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads;
  int head_dim;  // 0: hidden_size / num_heads
  double partial_rotary_factor;
  int num_experts, num_experts_per_token, moe_intermediate_size, shared_expert_intermediate_size;
  bool norm_topk_prob;
};

FamilyDefaults defaults_of(Architecture architecture) {
  switch (architecture) {
    case Architecture::qwen3:
      return {151936, 4096, 22016, 32, 32, 32, 128, 1.0, 0, 0, 0, 0, false};
    case Architecture::qwen3_moe:
      return {151936, 2048, 6144, 24, 32, 4, 0, 1.0, 128, 8, 768, 0, false};
    case Architecture::qwen3_next:
      return {151936, 2048, 5632, 48, 16, 2, 256, 0.25, 512, 10, 512, 512, true};
    case Architecture::qwen3_5:
      return {248320, 4096, 12288, 32, 16, 4, 256, 0.25, 0, 0, 0, 0, false};
    case Architecture::qwen3_5_moe:
      return {248320, 2048, 0, 40, 16, 2, 256, 0.25, 256, 8, 512, 512, true};
  }
  throw InvalidArgument("unknown architecture");
}

constexpr int kDefaultMaxPositions = 32768;
constexpr std::int64_t kLargestSize = std::int64_t{1} << 24;     // of one dimension
constexpr std::int64_t kLargestProduct = std::int64_t{1} << 30;  // of heads x head size, in elements
constexpr int kLargestLayerCount = 4096;

bool has_experts(Architecture architecture) {
  return architecture == Architecture::qwen3_moe || architecture == Architecture::qwen3_next ||
         architecture == Architecture::qwen3_5_moe;
}

Architecture read_architecture(const JsonFields& root, const JsonFields& text) {
  const JsonFields& holder = text.has("model_type") ? text : root;
  const auto type = holder.text("model_type");
  DELTAIC_CHECK(type.has_value(), text.full_name("model_type"), " is missing");
  if (*type == "qwen3") return Architecture::qwen3;
  if (*type == "qwen3_moe") return Architecture::qwen3_moe;
  if (*type == "qwen3_next") return Architecture::qwen3_next;
  if (*type == "qwen3_5_text" || *type == "qwen3_5") return Architecture::qwen3_5;
  if (*type == "qwen3_5_moe_text" || *type == "qwen3_5_moe") return Architecture::qwen3_5_moe;
  throw Unsupported(detail::concat(holder.full_name("model_type"), " is \"", *type,
                                   "\"; deltaic runs qwen3, qwen3_moe, qwen3_next, qwen3_5 and qwen3_5_moe"));
}

void refuse_unsupported_options(const JsonFields& root, const JsonFields& text, const ModelConfig& model) {
  for (const JsonFields* fields : {&root, &text})
    if (fields->has("quantization_config"))
      throw Unsupported(fields->full_name("quantization_config") + ": quantised checkpoints are not supported");
  if (text.boolean("use_sliding_window").value_or(false))
    throw Unsupported(text.full_name("use_sliding_window") + " is true; deltaic has no sliding window attention");
  const std::string activation = text.text("hidden_act").value_or("silu");
  if (activation != "silu")
    throw Unsupported(text.full_name("hidden_act") + " is \"" + activation + "\"; deltaic has silu");
  const bool gate = text.boolean("attn_output_gate").value_or(model.attention_output_gate);
  if (gate != model.attention_output_gate)
    throw Unsupported(detail::concat(text.full_name("attn_output_gate"), " is ", gate ? "true" : "false", "; in ",
                                     name(model.architecture), " deltaic has ",
                                     gate ? "no output gate" : "the output gate alone"));
}

void read_layer_kinds(const JsonFields& text, ModelConfig& model) {
  const json* types = text.find("layer_types");
  const int interval = text.integer("full_attention_interval", 1, kLargestLayerCount).value_or(4);
  if (types == nullptr) {
    for (int i = 0; i < model.num_layers; ++i)
      model.layer_kinds.push_back(model.is_hybrid_family() && (i + 1) % interval != 0 ? LayerKind::linear_attention
                                                                                      : LayerKind::full_attention);
    return;
  }
  const std::string field = text.full_name("layer_types");
  DELTAIC_CHECK(types->is_array(), field, " is ", JsonFields::show(*types), ", not a list");
  DELTAIC_CHECK(types->size() == static_cast<std::size_t>(model.num_layers), field, " has ", types->size(),
                " entries, num_hidden_layers is ", model.num_layers);
  for (std::size_t i = 0; i < types->size(); ++i) {
    const json& type = (*types)[i];
    if (type == "full_attention") {
      model.layer_kinds.push_back(LayerKind::full_attention);
    } else if (type == "linear_attention") {
      DELTAIC_CHECK(model.is_hybrid_family(), field, "[", i, "] is \"linear_attention\", which ",
                    name(model.architecture), " does not have");
      model.layer_kinds.push_back(LayerKind::linear_attention);
    } else if (type == "sliding_attention") {
      throw Unsupported(detail::concat(field, "[", i, "] is \"sliding_attention\"; deltaic has no sliding window"));
    } else {
      throw InvalidArgument(detail::concat(field, "[", i, "] is ", JsonFields::show(type),
                                           ", not \"full_attention\" or \"linear_attention\""));
    }
  }
}

void read_attention(const JsonFields& text, const FamilyDefaults& defaults, ModelConfig& model) {
  model.num_heads = text.integer("num_attention_heads", 1, kLargestSize).value_or(defaults.num_heads);
  model.num_kv_heads = text.integer("num_key_value_heads", 1, kLargestSize).value_or(defaults.num_kv_heads);
  DELTAIC_CHECK(model.num_heads % model.num_kv_heads == 0, text.full_name("num_attention_heads"), " is ",
                model.num_heads, ", not a multiple of num_key_value_heads, which is ", model.num_kv_heads);
  if (const auto head_dim = text.integer("head_dim", 1, kLargestSize)) {
    model.head_dim = *head_dim;
  } else if (defaults.head_dim > 0) {
    model.head_dim = defaults.head_dim;
  } else {
    DELTAIC_CHECK(model.hidden_size % model.num_heads == 0, text.full_name("head_dim"), " is missing and hidden_size, ",
                  model.hidden_size, ", is not a multiple of num_attention_heads, ", model.num_heads);
    model.head_dim = model.hidden_size / model.num_heads;
  }
  const std::int64_t columns = 2 * std::int64_t{model.num_heads} * model.head_dim;
  DELTAIC_CHECK(columns <= kLargestProduct, text.full_name("num_attention_heads"), " x head_dim is ", columns / 2,
                ", above ", kLargestProduct / 2);
  model.attention_bias = text.boolean("attention_bias").value_or(false);
}

void read_linear_attention(const JsonFields& text, ModelConfig& model) {
  model.linear_num_key_heads = text.integer("linear_num_key_heads", 1, kLargestSize).value_or(16);
  model.linear_num_value_heads = text.integer("linear_num_value_heads", 1, kLargestSize).value_or(32);
  DELTAIC_CHECK(model.linear_num_value_heads % model.linear_num_key_heads == 0,
                text.full_name("linear_num_value_heads"), " is ", model.linear_num_value_heads,
                ", not a multiple of linear_num_key_heads, which is ", model.linear_num_key_heads);
  model.linear_key_head_dim = text.integer("linear_key_head_dim", 1, kLargestSize).value_or(128);
  model.linear_value_head_dim = text.integer("linear_value_head_dim", 1, kLargestSize).value_or(128);
  model.linear_conv_kernel_dim = text.integer("linear_conv_kernel_dim", 2, 64).value_or(4);
  const std::int64_t channels = 2 * std::int64_t{model.linear_num_key_heads} * model.linear_key_head_dim +
                                2 * std::int64_t{model.linear_num_value_heads} * model.linear_value_head_dim;
  DELTAIC_CHECK(channels <= kLargestProduct, text.full_name("linear_num_value_heads"), " x linear_value_head_dim and ",
                "linear_num_key_heads x linear_key_head_dim give ", channels, " channels, above ", kLargestProduct);
}

int read_num_experts(const JsonFields& text, const ModelConfig& model, int default_value) {
  const int smallest = model.architecture == Architecture::qwen3_5_moe ? 1 : 0;  // 0: all layers are dense
  const auto count = text.integer("num_experts", smallest, kLargestSize);
  const auto local_count = text.integer("num_local_experts", smallest, kLargestSize);
  DELTAIC_CHECK(!count || !local_count || *count == *local_count, text.full_name("num_experts"), " is ", *count,
                " and num_local_experts is ", *local_count);
  return count ? *count : local_count.value_or(default_value);
}

std::vector<bool> read_mlp_only_layers(const JsonFields& text, int num_layers) {
  std::vector<bool> mlp_only(num_layers, false);
  const json* list = text.find("mlp_only_layers");
  if (list == nullptr) return mlp_only;
  const std::string field = text.full_name("mlp_only_layers");
  DELTAIC_CHECK(list->is_array(), field, " is ", JsonFields::show(*list), ", not a list");
  for (const json& layer : *list) {
    DELTAIC_CHECK(layer.is_number_integer() && layer.get<double>() >= 0 && layer.get<double>() < num_layers, field,
                  " has ", JsonFields::show(layer), ", outside [0, ", num_layers, ")");
    mlp_only[layer.get<int>()] = true;
  }
  return mlp_only;
}

// Which layers are MoE (docs/models.md, "Layer kinds"), and the sizes of both kinds of feed-forward.
void read_feed_forward(const JsonFields& text, const FamilyDefaults& defaults, ModelConfig& model) {
  model.is_moe_layer.assign(model.num_layers, false);
  int num_experts = 0;
  if (has_experts(model.architecture)) {
    num_experts = read_num_experts(text, model, defaults.num_experts);
    const bool all = model.architecture == Architecture::qwen3_5_moe;
    const int step = all ? 1 : text.integer("decoder_sparse_step", 1, kLargestSize).value_or(1);
    const auto mlp_only = all ? std::vector<bool>(model.num_layers) : read_mlp_only_layers(text, model.num_layers);
    for (int i = 0; i < model.num_layers; ++i)
      model.is_moe_layer[i] = num_experts > 0 && !mlp_only[i] && (i + 1) % step == 0;
  }
  const auto num_moe_layers = std::count(model.is_moe_layer.begin(), model.is_moe_layer.end(), true);
  if (num_moe_layers < model.num_layers)
    model.intermediate_size = text.integer("intermediate_size", 1, kLargestSize).value_or(defaults.intermediate_size);
  if (num_moe_layers == 0) return;
  model.num_experts = num_experts;
  model.num_experts_per_token =
      text.integer("num_experts_per_tok", 1, kLargestSize).value_or(defaults.num_experts_per_token);
  DELTAIC_CHECK(model.num_experts_per_token <= num_experts, text.full_name("num_experts_per_tok"), " is ",
                model.num_experts_per_token, ", above the number of experts, which is ", num_experts);
  model.moe_intermediate_size =
      text.integer("moe_intermediate_size", 1, kLargestSize).value_or(defaults.moe_intermediate_size);
  if (model.architecture != Architecture::qwen3_moe)
    model.shared_expert_intermediate_size = text.integer("shared_expert_intermediate_size", 1, kLargestSize)
                                                .value_or(defaults.shared_expert_intermediate_size);
  const auto norm_topk_prob = text.boolean("norm_topk_prob");
  model.norm_topk_prob =
      model.architecture == Architecture::qwen3_5_moe || norm_topk_prob.value_or(defaults.norm_topk_prob);
}

std::vector<int> read_eos_token_ids(const JsonFields& fields, int vocab_size) {
  const json* value = fields.find("eos_token_id");
  if (value == nullptr) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<int> ids;
  for (const json& id : list) {
    DELTAIC_CHECK(id.is_number_integer() && id.get<double>() >= 0 && id.get<double>() < vocab_size,
                  fields.full_name("eos_token_id"), " is ", JsonFields::show(*value),
                  ", not ids inside the vocabulary of ", vocab_size);
    ids.push_back(id.get<int>());
  }
  return ids;
}

std::optional<DType> read_dtype(const JsonFields& root, const JsonFields& text) {
  for (const JsonFields* fields : {&text, &root})
    for (const char* key : {"dtype", "torch_dtype"}) {
      const auto dtype = fields->text(key);
      if (dtype == "float32" || dtype == "torch.float32") return DType::f32;
      if (dtype == "bfloat16" || dtype == "torch.bfloat16") return DType::bf16;
      if (dtype == "float16" || dtype == "torch.float16") return DType::f16;
    }
  return std::nullopt;
}

ModelConfig read_model(const JsonFields& root, const JsonFields& text) {
  ModelConfig model;
  model.architecture = read_architecture(root, text);
  model.attention_output_gate = model.is_hybrid_family();
  refuse_unsupported_options(root, text, model);
  const FamilyDefaults defaults = defaults_of(model.architecture);

  model.vocab_size = text.integer("vocab_size", 1, kLargestSize).value_or(defaults.vocab_size);
  model.hidden_size = text.integer("hidden_size", 1, kLargestSize).value_or(defaults.hidden_size);
  model.num_layers = text.integer("num_hidden_layers", 1, kLargestLayerCount).value_or(defaults.num_layers);
  model.max_position_embeddings =
      text.integer("max_position_embeddings", 1, std::numeric_limits<int>::max()).value_or(kDefaultMaxPositions);
  model.rms_norm_eps = text.number("rms_norm_eps").value_or(model.rms_norm_eps);
  DELTAIC_CHECK(model.rms_norm_eps > 0.0 && model.rms_norm_eps < 1.0, text.full_name("rms_norm_eps"), " is ",
                model.rms_norm_eps, ", outside (0, 1)");
  model.tie_word_embeddings =
      text.boolean("tie_word_embeddings").value_or(false) || root.boolean("tie_word_embeddings").value_or(false);
  model.eos_token_ids = read_eos_token_ids(text.has("eos_token_id") ? text : root, model.vocab_size);
  model.dtype = read_dtype(root, text);

  read_layer_kinds(text, model);
  read_attention(text, defaults, model);
  read_rope_config(text, defaults.partial_rotary_factor, model);
  if (model.num_layers_of(LayerKind::linear_attention) > 0) read_linear_attention(text, model);
  read_feed_forward(text, defaults, model);
  if (model.is_hybrid_family()) {
    const char* key = text.has("mtp_num_hidden_layers") ? "mtp_num_hidden_layers" : "num_nextn_predict_layers";
    model.num_mtp_layers = text.integer(key, 0, kLargestLayerCount).value_or(0);
  }
  return model;
}

}  // namespace

ModelConfig parse_model_config(std::string_view text) {
  const json document = parse_json(text);
  DELTAIC_CHECK(document.is_object(), "not a JSON object but ", JsonFields::show(document));
  const JsonFields root(document, "");
  const auto nested = root.object("text_config");
  return read_model(root, nested ? *nested : root);
}

ModelConfig load_model_config(const std::filesystem::path& path) {
  std::error_code ignored;  // what cannot be looked at cannot be opened either
  const auto file = std::filesystem::is_directory(path, ignored) ? path / "config.json" : path;
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  DELTAIC_CHECK(stream && !stream.bad(), file.string(), " cannot be read: ", std::strerror(errno));
  try {
    return parse_model_config(text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(file.string() + ": " + error.what());
  } catch (const Unsupported& error) {
    throw Unsupported(file.string() + ": " + error.what());
  }
}

}  // namespace deltaic

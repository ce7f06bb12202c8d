#include <deltaic/config.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests_cpp/support/temp_dir.h"

using namespace deltaic;
using nlohmann::json;

namespace {

const std::filesystem::path kParity = std::filesystem::path(DELTAIC_SOURCE_DIR) / "tests_py/data/parity";

json small(const std::string& model_type) {
  json config = json::parse(R"({"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32})");
  config["model_type"] = model_type;
  return config;
}

ModelConfig parse(const json& config) { return parse_model_config(config.dump()); }

// The message of the error that `config` gives; "" without one.
template <class ErrorType>
std::string error_of(const json& config) {
  try {
    parse(config);
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("absent keys take the defaults of their family") {
  struct Expected {
    const char* model_type;
    int vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, rotary_dim, experts, per_token, moe, shared;
    bool norm_topk;
  };
  for (const auto& e : {Expected{"qwen3", 151936, 4096, 22016, 32, 32, 32, 128, 128, 0, 0, 0, 0, false},
                        Expected{"qwen3_moe", 151936, 2048, 0, 24, 32, 4, 64, 64, 128, 8, 768, 0, false},
                        Expected{"qwen3_next", 151936, 2048, 0, 48, 16, 2, 256, 64, 512, 10, 512, 512, true},
                        Expected{"qwen3_5_text", 248320, 4096, 12288, 32, 16, 4, 256, 64, 0, 0, 0, 0, false},
                        Expected{"qwen3_5_moe_text", 248320, 2048, 0, 40, 16, 2, 256, 64, 256, 8, 512, 512, true}}) {
    CAPTURE(e.model_type);
    const ModelConfig model = parse({{"model_type", e.model_type}});
    CHECK(model.vocab_size == e.vocab);
    CHECK(model.hidden_size == e.hidden);
    CHECK(model.intermediate_size == e.intermediate);
    CHECK(model.num_layers == e.layers);
    CHECK(model.num_heads == e.heads);
    CHECK(model.num_kv_heads == e.kv_heads);
    CHECK(model.head_dim == e.head_dim);
    CHECK(model.rotary_dim == e.rotary_dim);
    CHECK(model.num_experts == e.experts);
    CHECK(model.num_experts_per_token == e.per_token);
    CHECK(model.moe_intermediate_size == e.moe);
    CHECK(model.shared_expert_intermediate_size == e.shared);
    CHECK(model.norm_topk_prob == e.norm_topk);
    CHECK(model.rms_norm_eps == 1e-6);
    CHECK(model.rope.theta == 10000.0);
    CHECK_FALSE(model.tie_word_embeddings);
    CHECK_FALSE(model.attention_bias);
    const bool hybrid = model.is_hybrid_family();
    CHECK(model.attention_output_gate == hybrid);
    CHECK(model.linear_num_key_heads == (hybrid ? 16 : 0));
    CHECK(model.linear_num_value_heads == (hybrid ? 32 : 0));
    CHECK(model.linear_conv_kernel_dim == (hybrid ? 4 : 0));
    CHECK(model.num_layers_of(LayerKind::linear_attention) == (hybrid ? e.layers * 3 / 4 : 0));
  }
}

TEST_CASE("the nested form and the flat form give the same model") {
  const json flat = small("qwen3_5_text");
  const json nested{{"model_type", "qwen3_5"}, {"vision_config", {{"depth", 1}}}, {"text_config", flat}};
  const ModelConfig a = parse(flat), b = parse(nested);
  CHECK(b.architecture == Architecture::qwen3_5);
  CHECK(a.hidden_size == b.hidden_size);
  CHECK(a.layer_kinds == b.layer_kinds);
  CHECK(a.num_parameters() == b.num_parameters());
}

TEST_CASE("rotary values: inside rope_parameters first, then the top level, then the default") {
  json config = small("qwen3_next");
  CHECK(parse(config).rope.theta == 10000.0);
  CHECK(parse(config).rotary_dim == 4);
  config["rope_theta"] = 1e6;
  config["partial_rotary_factor"] = 0.5;
  CHECK(parse(config).rope.theta == 1e6);
  CHECK(parse(config).rotary_dim == 8);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e7}};
  CHECK(parse(config).rope.theta == 1e7);
  CHECK(parse(config).rotary_dim == 8);
  config["rope_parameters"]["partial_rotary_factor"] = 1.0;
  CHECK(parse(config).rotary_dim == 16);
}

TEST_CASE("scaled rope is read from rope_scaling and from rope_parameters, under rope_type or type") {
  json config = small("qwen3");
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  const ModelConfig yarn = parse(config);
  CHECK(yarn.rope.type == RopeType::yarn);
  CHECK(yarn.rope.factor == 4.0);
  CHECK(yarn.rope.original_max_position_embeddings == 4096.0);
  CHECK(yarn.rope.beta_fast == 32.0);
  CHECK(yarn.rope.truncate);
  CHECK_FALSE(yarn.rope.attention_factor.has_value());

  config.erase("rope_scaling");
  config["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 2},       {"original_max_position_embeddings", 1024},
                               {"beta_fast", 16},     {"truncate", false}, {"attention_factor", 1.5}};
  const ModelConfig given = parse(config);
  CHECK(given.rope.original_max_position_embeddings == 1024.0);
  CHECK(given.rope.beta_fast == 16.0);
  CHECK_FALSE(given.rope.truncate);
  CHECK(given.rope.attention_factor == 1.5);

  config["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2}};
  CHECK(parse(config).rope.type == RopeType::linear);
}

TEST_CASE("layer_types wins over full_attention_interval, and any pattern is legal") {
  using enum LayerKind;
  json config = small("qwen3_next");
  config["full_attention_interval"] = 2;
  CHECK(parse(config).layer_kinds == std::vector{linear_attention, full_attention, linear_attention, full_attention});
  config["layer_types"] = {"full_attention", "linear_attention", "linear_attention", "full_attention"};
  CHECK(parse(config).layer_kinds == std::vector{full_attention, linear_attention, linear_attention, full_attention});
}

TEST_CASE("which layers are MoE") {
  json config = small("qwen3_moe");
  CHECK(parse(config).is_moe_layer == std::vector{true, true, true, true});
  CHECK(parse(config).intermediate_size == 0);
  config["decoder_sparse_step"] = 2;
  CHECK(parse(config).is_moe_layer == std::vector{false, true, false, true});
  CHECK(parse(config).intermediate_size == 128);
  config["mlp_only_layers"] = {3};
  CHECK(parse(config).is_moe_layer == std::vector{false, true, false, false});
  config["num_experts"] = 0;
  CHECK(parse(config).is_moe_layer == std::vector{false, false, false, false});
  CHECK(parse(config).num_experts == 0);

  json all = small("qwen3_5_moe_text");
  all["decoder_sparse_step"] = 2;
  all["mlp_only_layers"] = {3};
  all["norm_topk_prob"] = false;
  CHECK(parse(all).is_moe_layer == std::vector{true, true, true, true});
  CHECK(parse(all).norm_topk_prob);
}

TEST_CASE("num_local_experts is num_experts under another name") {
  json config = small("qwen3_moe");
  config.erase("num_experts");
  config["num_local_experts"] = 6;
  CHECK(parse(config).num_experts == 6);
}

TEST_CASE("the tie, the stop tokens and the dtype may stand at either level") {
  json text = small("qwen3_5_text");
  text["eos_token_id"] = {7, 8};
  const json outer{{"model_type", "qwen3_5"},
                   {"text_config", text},
                   {"tie_word_embeddings", true},
                   {"torch_dtype", "bfloat16"},
                   {"eos_token_id", 9}};
  const ModelConfig model = parse(outer);
  CHECK(model.tie_word_embeddings);
  CHECK(model.dtype == DType::bf16);
  CHECK(model.eos_token_ids == std::vector{7, 8});
  json inner = text;
  inner["eos_token_id"] = nullptr;
  inner["tie_word_embeddings"] = true;
  inner["dtype"] = "float32";
  const ModelConfig other = parse({{"model_type", "qwen3_5"}, {"text_config", inner}, {"eos_token_id", 9}});
  CHECK(other.tie_word_embeddings);
  CHECK(other.dtype == DType::f32);
  CHECK(other.eos_token_ids == std::vector{9});
}

TEST_CASE("layers of the draft module") {
  json config = small("qwen3_5_text");
  CHECK(parse(config).num_mtp_layers == 0);
  config["mtp_num_hidden_layers"] = 1;
  CHECK(parse(config).num_mtp_layers == 1);
  json next = small("qwen3_next");
  next["num_nextn_predict_layers"] = 2;
  CHECK(parse(next).num_mtp_layers == 2);
}

TEST_CASE("a value that a config must not have is refused with its field and numbers") {
  struct Case {
    const char* model_type;
    const char* patch;
    const char* message;
  };
  for (const auto& [model_type, patch, message] : {
           Case{"qwen3", R"({"model_type": null})", "model_type is missing"},
           Case{"qwen3", R"({"model_type": 3})", "model_type is 3, not a string"},
           Case{"qwen3", R"({"vocab_size": 0})", "vocab_size is 0, outside [1, 16777216]"},
           Case{"qwen3", R"({"hidden_size": -64})", "hidden_size is -64, outside [1, 16777216]"},
           Case{"qwen3", R"({"hidden_size": 64.5})", "hidden_size is 64.5, not an integer"},
           Case{"qwen3", R"({"hidden_size": "64"})", "hidden_size is \"64\", not an integer"},
           Case{"qwen3", R"({"hidden_size": 18446744073709551615})", "hidden_size is 18446744073709551615, outside"},
           Case{"qwen3", R"({"num_hidden_layers": 5000})", "num_hidden_layers is 5000, outside [1, 4096]"},
           Case{"qwen3", R"({"max_position_embeddings": 4294967296})",
                "max_position_embeddings is 4294967296, outside"},
           Case{"qwen3", R"({"rms_norm_eps": 0})", "rms_norm_eps is 0, outside (0, 1)"},
           Case{"qwen3", R"({"rms_norm_eps": "x"})", "rms_norm_eps is \"x\", not a finite number"},
           Case{"qwen3", R"({"num_key_value_heads": 3})",
                "num_attention_heads is 4, not a multiple of num_key_value_heads, which is 3"},
           Case{"qwen3", R"({"num_attention_heads": 16777216, "head_dim": 16777216})",
                "num_attention_heads x head_dim is 281474976710656, above"},
           Case{"qwen3_moe", R"({"head_dim": null, "hidden_size": 65})",
                "head_dim is missing and hidden_size, 65, is not a multiple of num_attention_heads, 4"},
           Case{"qwen3", R"({"attention_bias": 1})", "attention_bias is 1, not true or false"},
           Case{"qwen3", R"({"tie_word_embeddings": "yes"})", "tie_word_embeddings is \"yes\", not true or false"},
           Case{"qwen3", R"({"eos_token_id": 256})", "eos_token_id is 256, not ids inside the vocabulary of 256"},
           Case{"qwen3", R"({"eos_token_id": [3, -1]})", "eos_token_id is [3,-1], not ids inside"},
           Case{"qwen3", R"({"layer_types": ["full_attention"]})", "layer_types has 1 entries, num_hidden_layers is 4"},
           Case{"qwen3", R"({"layer_types": 4})", "layer_types is 4, not a list"},
           Case{"qwen3", R"({"num_hidden_layers": 1, "layer_types": ["linear_attention"]})",
                "layer_types[0] is \"linear_attention\", which qwen3 does not have"},
           Case{"qwen3_next", R"({"num_hidden_layers": 1, "layer_types": ["mamba"]})", "layer_types[0] is \"mamba\""},
           Case{"qwen3_next", R"({"full_attention_interval": 0})", "full_attention_interval is 0, outside [1, 4096]"},
           Case{"qwen3_next", R"({"linear_num_value_heads": 3})",
                "linear_num_value_heads is 3, not a multiple of linear_num_key_heads, which is 2"},
           Case{"qwen3_next", R"({"linear_conv_kernel_dim": 1})", "linear_conv_kernel_dim is 1, outside [2, 64]"},
           Case{"qwen3_next", R"({"linear_key_head_dim": 16777216, "linear_num_key_heads": 16777216,
                                  "linear_num_value_heads": 16777216})",
                "channels, above 1073741824"},
           Case{"qwen3_moe", R"({"num_experts_per_tok": 9})",
                "num_experts_per_tok is 9, above the number of experts, which is 8"},
           Case{"qwen3_moe", R"({"num_local_experts": 4})", "num_experts is 8 and num_local_experts is 4"},
           Case{"qwen3_moe", R"({"mlp_only_layers": [4]})", "mlp_only_layers has 4, outside [0, 4)"},
           Case{"qwen3_moe", R"({"decoder_sparse_step": 0})", "decoder_sparse_step is 0, outside"},
           Case{"qwen3_5_moe_text", R"({"num_experts": 0})", "num_experts is 0, outside"},
           Case{"qwen3_5_moe_text", R"({"shared_expert_intermediate_size": 0})",
                "shared_expert_intermediate_size is 0, outside"},
           Case{"qwen3", R"({"rope_theta": 0})", "rope_theta is 0, it must be above 0"},
           Case{"qwen3", R"({"rope_parameters": 3})", "rope_parameters is 3, not an object"},
           Case{"qwen3", R"({"rope_parameters": {"rope_theta": -1}})", "rope_parameters.rope_theta is -1"},
           Case{"qwen3", R"({"partial_rotary_factor": 1.5})", "partial_rotary_factor is 1.5, outside (0, 1]"},
           Case{"qwen3", R"({"partial_rotary_factor": 0.2})",
                "partial_rotary_factor is 0.2 and head_dim is 16: 3 channels would rotate"},
           Case{"qwen3", R"({"rope_scaling": {"type": "yarn"}})", "rope_scaling.factor is missing"},
           Case{"qwen3", R"({"rope_scaling": {"type": "linear", "factor": 0.5}})",
                "rope_scaling.factor is 0.5, below 1"},
           Case{"qwen3", R"({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1}})",
                "rope_scaling.beta_fast is 1, it must be above beta_slow, which is 1"},
           Case{"qwen3", R"({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {}})",
                "rope_parameters and rope_scaling are both given and differ"},
           Case{"qwen3_5_text", R"({"rope_parameters": {"mrope_section": [2, 1, 1]}})",
                "rope_parameters.mrope_section is [2,1,1] and sums to 4, but 4 channels rotate in 2 pairs"},
           Case{"qwen3_5_text", R"({"rope_parameters": {"mrope_section": [1, 1]}})", "not a list of 3 sizes"},
           Case{"qwen3_5_text", R"({"mtp_num_hidden_layers": -1})", "mtp_num_hidden_layers is -1, outside"},
       }) {
    CAPTURE(patch);
    json config = small(model_type);
    config.update(json::parse(patch));
    CHECK_MESSAGE(error_of<InvalidArgument>(config).find(message) != std::string::npos,
                  "got: " << error_of<InvalidArgument>(config));
  }
}

TEST_CASE("an option that deltaic does not have is refused by name") {
  struct Case {
    const char* model_type;
    const char* patch;
    const char* message;
  };
  for (const auto& [model_type, patch, message] : {
           Case{"llama", "{}", "model_type is \"llama\"; deltaic runs qwen3, qwen3_moe, qwen3_next, qwen3_5 and"},
           Case{"qwen3", R"({"use_sliding_window": true})", "use_sliding_window is true"},
           Case{"qwen3", R"({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})",
                "layer_types[0] is \"sliding_attention\""},
           Case{"qwen3", R"({"hidden_act": "gelu"})", "hidden_act is \"gelu\""},
           Case{"qwen3", R"({"attn_output_gate": true})", "attn_output_gate is true"},
           Case{"qwen3_5_text", R"({"attn_output_gate": false})", "attn_output_gate is false"},
           Case{"qwen3", R"({"quantization_config": {"quant_method": "fp8"}})", "quantization_config"},
           Case{"qwen3", R"({"rope_scaling": {"type": "dynamic", "factor": 2}})", "rope_scaling.type is \"dynamic\""},
           Case{"qwen3", R"({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}})", "rope_scaling.mscale"},
           Case{"qwen3", R"({"rope_parameters": {"full_attention": {"rope_theta": 1}}})",
                "rope_parameters.full_attention"},
           Case{"qwen3_5_text", R"({"rope_parameters": {"mrope_interleaved": false}})", "mrope_interleaved is false"},
       }) {
    CAPTURE(patch);
    json config = small(model_type);
    config.update(json::parse(patch));
    CHECK_MESSAGE(error_of<Unsupported>(config).find(message) != std::string::npos,
                  "got: " << error_of<Unsupported>(config));
  }
}

TEST_CASE("a config that is no JSON object, and a field of the nested part, are named") {
  CHECK_THROWS_AS(parse_model_config(""), InvalidArgument);
  CHECK_THROWS_AS(parse_model_config("{\"a\": "), InvalidArgument);
  CHECK_THROWS_WITH_AS(parse_model_config("[1]"), "not a JSON object but [1]", InvalidArgument);
  json text = small("qwen3_5_text");
  text["hidden_size"] = 0;
  CHECK(error_of<InvalidArgument>({{"text_config", text}}).find("text_config.hidden_size is 0") == 0);
}

TEST_CASE("load_model_config reads a folder or a file, and names the path in every error") {
  const auto folder = kParity / "qwen3_5/fp32";
  CHECK(load_model_config(folder).hidden_size == 64);
  CHECK(load_model_config(folder / "config.json").num_layers == 4);
  const test::TempDir dir;
  const std::string missing = (dir.path() / "config.json").string() + " cannot be read: No such file or directory";
  CHECK_THROWS_WITH_AS(load_model_config(dir.path()), missing.c_str(), InvalidArgument);
  const auto bad = dir.write("config.json", R"({"model_type": "qwen3", "vocab_size": 0})");
  const std::string message = bad.string() + ": vocab_size is 0, outside [1, 16777216]";
  CHECK_THROWS_WITH_AS(load_model_config(dir.path()), message.c_str(), InvalidArgument);
}

TEST_CASE("every parity checkpoint's config is read as its maker meant it") {
  const ModelConfig next = load_model_config(kParity / "qwen3_next/bf16");
  CHECK(next.rope.theta == 1e7);
  CHECK(next.rotary_dim == 4);
  CHECK(next.norm_topk_prob);
  CHECK(next.dtype == DType::bf16);
  const ModelConfig moe = load_model_config(kParity / "qwen3_moe/fp32");
  CHECK(moe.num_experts == 8);
  CHECK(moe.num_experts_per_token == 4);
  CHECK(moe.rope.theta == 1e6);
  const ModelConfig nested = load_model_config(kParity / "qwen3_5_cond_h256/bf16");
  CHECK(nested.tie_word_embeddings);
  CHECK(nested.rotary_dim == 64);
  CHECK(nested.rope.mrope_section == std::array{11, 11, 10});
  CHECK(nested.num_mtp_layers == 0);
  CHECK(load_model_config(kParity / "qwen3_5_moe_cond_h128/bf16_fused").num_mtp_layers == 1);
}

TEST_CASE("num_parameters counts the published sizes") {
  // The defaults of qwen3_5 are the sizes of Qwen3.5-9B, those of qwen3_5_moe the sizes of Qwen3.5-35B-A3B.
  const ModelConfig dense = parse({{"model_type", "qwen3_5_text"}});
  CHECK(dense.num_parameters() / 1e9 == doctest::Approx(8.95).epsilon(0.01));
  const ModelConfig moe = parse({{"model_type", "qwen3_5_moe_text"}});
  CHECK(moe.num_parameters() / 1e9 == doctest::Approx(34.7).epsilon(0.01));
}

TEST_CASE("a damaged config gives a model or a named error, never anything else") {
  json config = small("qwen3_5_moe_text");
  config["rope_parameters"] = {
      {"rope_type", "yarn"}, {"factor", 2.0}, {"mrope_section", {1, 1, 0}}, {"partial_rotary_factor", 0.25}};
  config["layer_types"] = {"full_attention", "linear_attention", "linear_attention", "full_attention"};
  config["eos_token_id"] = {1, 2};
  const json values[] = {nullptr,
                         true,
                         -1,
                         0,
                         1,
                         3.5,
                         1e300,
                         -1e300,
                         9223372036854775807,
                         18446744073709551615ULL,
                         "text",
                         json::array(),
                         {1, "x", nullptr},
                         json::object(),
                         {{"a", 1}}};
  parse(config);
  for (const auto& [key, original] : config.items())
    for (const json& value : values) {
      json damaged = config;
      damaged[key] = value;
      CAPTURE(damaged[key].dump());
      CAPTURE(key);
      try {
        const ModelConfig model = parse(damaged);
        CHECK(model.num_parameters() > 0);
      } catch (const InvalidArgument& error) {
        CHECK_MESSAGE(std::string(error.what()).find('\n') == std::string::npos, error.what());
      } catch (const Unsupported& error) {
        CHECK_MESSAGE(std::string(error.what()).find(key) != std::string::npos, error.what());
      }
    }
}

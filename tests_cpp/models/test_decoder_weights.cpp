#include <cstring>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/models/decoder_weights.h"
#include "tests_cpp/support/temp_dir.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::make_tiny_model;
using test::TinyModel;

namespace {

const std::filesystem::path kParity = std::filesystem::path(DELTAIC_SOURCE_DIR) / "tests_py/data/parity";
constexpr Architecture kArchitectures[] = {Architecture::qwen3, Architecture::qwen3_moe, Architecture::qwen3_next,
                                           Architecture::qwen3_5, Architecture::qwen3_5_moe};

auto load(const TinyModel& model) { return load_decoder_weights(model.config, Checkpoint::from_memory(model.tensors)); }

template <class ErrorType>
std::string error_of(const TinyModel& model) {
  try {
    load(model);
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

const GatedDeltaNet& gdn(const DecoderWeights& weights, int layer) {
  return std::get<GatedDeltaNet>(weights.layers[layer].mixer);
}

}  // namespace

TEST_CASE("matrices are views of the checkpoint, small vectors are f32 copies") {
  for (const Architecture architecture : kArchitectures) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture);
    const auto weights = load(model);
    REQUIRE(weights->layers.size() == 4);
    CHECK(weights->embedding.view.data == model.tensors.at("model.embed_tokens.weight").data);
    CHECK(weights->head.view.data == model.tensors.at("lm_head.weight").data);
    const auto& attention = std::get<Attention>(weights->layers[3].mixer);
    CHECK(attention.qkv_proj.parts[1].weight.view.data ==
          model.tensors.at("model.layers.3.self_attn.k_proj.weight").data);
    CHECK(weights->final_norm.view().data != model.tensors.at("model.norm.weight").data);
    CHECK(weights->num_bytes == 4 * model.config.num_parameters());
  }
}

TEST_CASE("1 + w is folded into zero-centred norms, never into the gated norm") {
  const TinyModel plain = make_tiny_model(Architecture::qwen3);
  CHECK(load(plain)->final_norm.as<float>()[5] == plain.values("model.norm.weight")[5]);
  const TinyModel hybrid = make_tiny_model(Architecture::qwen3_5);
  const auto weights = load(hybrid);
  CHECK(weights->final_norm.as<float>()[5] == 1.0F + hybrid.values("model.norm.weight")[5]);
  const auto& attention = std::get<Attention>(weights->layers[3].mixer);
  CHECK(attention.q_norm.as<float>()[2] == 1.0F + hybrid.values("model.layers.3.self_attn.q_norm.weight")[2]);
  CHECK(gdn(*weights, 0).norm.as<float>()[2] == hybrid.values("model.layers.0.linear_attn.norm.weight")[2]);
}

TEST_CASE("D15: A_log keeps the f32 that the file has, beside bf16 weights") {
  const auto folder = kParity / "qwen3_5_cond_h256/bf16";
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const auto weights = load_decoder_weights(load_model_config(folder), checkpoint);
  const GatedDeltaNet& layer = gdn(*weights, 0);
  CHECK(layer.out_proj.view.dtype == DType::bf16);
  const std::int64_t shape[] = {2};
  const StoredTensor& stored = checkpoint.get("layers.0.linear_attn.A_log", shape);
  REQUIRE(stored.view.dtype == DType::f32);
  CHECK(std::memcmp(stored.view.data, layer.A_log.view().data, 8) == 0);
}

TEST_CASE("values of every stored dtype become f32") {
  TinyModel model = make_tiny_model(Architecture::qwen3);
  std::vector<std::uint16_t> f16(32, 0x3C00), bf16(32, 0x3F80);
  f16[0] = 0xC248, f16[1] = 0x0001, f16[2] = 0x03FF, f16[3] = 0x7BFF, f16[4] = 0x8000;
  bf16[0] = 0xC049;
  std::vector<double> f64(32, 0.1);
  model.tensors["model.norm.weight"] = make_view(f16.data(), DType::f16, {32});
  model.tensors["model.layers.0.input_layernorm.weight"] = make_view(bf16.data(), DType::bf16, {32});
  model.tensors["model.layers.1.input_layernorm.weight"] = make_view(f64.data(), DType::f64, {32});
  const auto weights = load(model);
  const float* half = weights->final_norm.as<float>();
  CHECK(half[0] == -3.140625F);
  CHECK(half[1] == 0x1p-24F);
  CHECK(half[2] == 1023 * 0x1p-24F);
  CHECK(half[3] == 65504.0F);
  CHECK(half[4] == 0.0F);
  CHECK(half[5] == 1.0F);
  CHECK(weights->layers[0].input_norm.as<float>()[0] == -3.140625F);
  CHECK(weights->layers[1].input_norm.as<float>()[0] == 0.1F);
}

TEST_CASE("the head that is in the files is used; tied, the missing one of the two is the other") {
  const auto data = [](const ops::Weight& weight) { return weight.view.data; };
  const TinyModel tied = make_tiny_model(Architecture::qwen3, {.tied = true});
  const auto shared = load(tied);
  CHECK(data(shared->head) == data(shared->embedding));
  CHECK(shared->num_bytes == 4 * tied.config.num_parameters());

  // Tied, and both are there: each is used as it is.
  TinyModel both = make_tiny_model(Architecture::qwen3);
  both.config.tie_word_embeddings = true;
  CHECK(data(load(both)->head) == both.tensors.at("lm_head.weight").data);
  CHECK(data(load(both)->embedding) == both.tensors.at("model.embed_tokens.weight").data);

  // Tied, and only the head is there: it is the embedding too.
  both.tensors.erase("model.embed_tokens.weight");
  CHECK(data(load(both)->embedding) == both.tensors.at("lm_head.weight").data);

  TinyModel untied = make_tiny_model(Architecture::qwen3);
  untied.tensors.erase("lm_head.weight");
  CHECK(error_of<InvalidArgument>(untied) == "the tensor lm_head.weight is missing, and tie_word_embeddings is false");
  TinyModel no_embedding = make_tiny_model(Architecture::qwen3);
  no_embedding.tensors.erase("model.embed_tokens.weight");
  CHECK(error_of<InvalidArgument>(no_embedding).find("embed_tokens.weight is missing, wanted [64, 32]") !=
        std::string::npos);
}

TEST_CASE("tensors of the vision tower and unknown ones are skipped, the draft module's are counted") {
  TinyModel model = make_tiny_model(Architecture::qwen3_5, {.prefix = "model.language_model."});
  const std::int64_t num_bytes = load(model)->num_bytes;
  model.set("model.visual.merger.norm.weight", {3}, {1, 2, 3});
  model.set("rotary_emb.inv_freq", {1}, {1});
  model.set("mtp.layers.0.input_layernorm.weight", {32}, std::vector<float>(32));
  model.set("mtp.layers.0.mlp.up_proj.weight", {1}, {1});
  model.set("mtp.layers.1.input_layernorm.weight", {32}, std::vector<float>(32));
  model.set("mtp.norm.weight", {32}, std::vector<float>(32));
  const auto weights = load(model);
  CHECK(weights->num_bytes == num_bytes);
  CHECK(weights->num_mtp_layers == 2);
}

TEST_CASE("every tensor of a model is needed and its shape is checked, by name") {
  for (const Architecture architecture : kArchitectures)
    for (const bool fused : {false, true}) {
      const TinyModel model = make_tiny_model(
          architecture, {.prefix = "model.language_model.", .fused_experts = fused, .attention_bias = true});
      for (const auto& [tensor_name, view] : model.tensors) {
        CAPTURE(tensor_name);
        TinyModel other{.config = model.config, .tensors = model.tensors, .memory = {}};
        other.tensors.erase(tensor_name);
        // Without its fused tensor a layer is taken for one with a tensor an expert.
        const bool is_layout = tensor_name.ends_with("experts.gate_up_proj");
        const std::string missing =
            is_layout ? tensor_name.substr(0, tensor_name.rfind('.')) + ".0.gate_proj.weight" : tensor_name;
        CHECK_MESSAGE(
            error_of<InvalidArgument>(other).find("the tensor " + missing + " is missing") != std::string::npos,
            error_of<InvalidArgument>(other));

        TensorView longer = view;
        longer.shape[view.rank - 1] += 1;
        other.tensors[tensor_name] = make_view(view.data, view.dtype, {longer.shape.data(), std::size_t(view.rank)});
        const std::string error = error_of<InvalidArgument>(other);
        CHECK_MESSAGE(error.find("the tensor " + tensor_name + " has shape [") != std::string::npos, error);
        CHECK(error.find("wanted [") != std::string::npos);
      }
    }
}

TEST_CASE("a weight of integers is refused") {
  TinyModel model = make_tiny_model(Architecture::qwen3);
  std::vector<std::int8_t> integers(64 * 32);
  model.tensors["lm_head.weight"] = make_view(integers.data(), DType::i8, {64, 32});
  CHECK(error_of<Unsupported>(model) == "the tensor lm_head.weight has dtype i8, which is not supported for it");
  model = make_tiny_model(Architecture::qwen3);
  model.tensors["model.norm.weight"] = make_view(integers.data(), DType::i8, {32});
  CHECK(error_of<Unsupported>(model) == "the tensor model.norm.weight has dtype i8, which is not supported for it");
}

TEST_CASE("a matrix at an address that its dtype cannot be read from is copied, its values unchanged") {
  TinyModel model = make_tiny_model(Architecture::qwen3);
  const std::vector<float> values = model.values("lm_head.weight");
  std::vector<char> bytes(values.size() * 4 + 1);
  std::memcpy(bytes.data() + 1, values.data(), values.size() * 4);
  model.tensors["lm_head.weight"] = make_view(bytes.data() + 1, DType::f32, {64, 32});
  const auto weights = load(model);
  CHECK(reinterpret_cast<std::uintptr_t>(weights->head.view.data) % 4 == 0);
  CHECK(std::memcmp(weights->head.view.data, values.data(), values.size() * 4) == 0);
}

TEST_CASE("every parity checkpoint loads, and its mapping outlives the checkpoint object") {
  int num_checkpoints = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kParity)) {
    if (entry.path().filename() != "config.json") continue;
    CAPTURE(entry.path());
    const auto folder = entry.path().parent_path();
    const ModelConfig config = load_model_config(folder);
    const auto weights = load_decoder_weights(config, Checkpoint::open(folder));
    CHECK(weights->layers.size() == static_cast<std::size_t>(config.num_layers));
    CHECK(weights->num_mtp_layers == config.num_mtp_layers);
    const auto* bytes = static_cast<const unsigned char*>(weights->head.view.data);
    unsigned sum = 0;
    for (std::size_t i = 0; i < weights->head.view.num_bytes(); ++i) sum += bytes[i];
    CHECK(sum > 0);
    ++num_checkpoints;
  }
  CHECK(num_checkpoints == 17);
}

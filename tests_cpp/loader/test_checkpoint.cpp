#include <array>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/loader/checkpoint.h"
#include "tests_cpp/support/temp_dir.h"

using namespace deltaic;

namespace {

const std::filesystem::path kParity = std::filesystem::path(DELTAIC_SOURCE_DIR) / "tests_py/data/parity";

TensorView scalar() {
  static float value = 0;
  return make_view(&value, DType::f32, {1});
}

const StoredTensor& get(const Checkpoint& checkpoint, std::string_view name, std::vector<std::int64_t> shape) {
  return checkpoint.get(name, shape);
}

}  // namespace

TEST_CASE("the prefix model. or model.language_model. is taken off, whichever is there") {
  for (const std::string prefix : {"model.", "model.language_model."}) {
    CAPTURE(prefix);
    const Checkpoint checkpoint = Checkpoint::from_memory({{prefix + "embed_tokens.weight", scalar()},
                                                           {prefix + "layers.0.mlp.up_proj.weight", scalar()},
                                                           {"lm_head.weight", scalar()},
                                                           {"mtp.norm.weight", scalar()},
                                                           {"model.visual.pos_embed.weight", scalar()},
                                                           {"something.else", scalar()}});
    CHECK(checkpoint.has("embed_tokens.weight"));
    CHECK(checkpoint.has("layers.0.mlp.up_proj.weight"));
    CHECK(checkpoint.has("lm_head.weight"));
    CHECK(checkpoint.has("something.else"));
    CHECK(checkpoint.names("").size() == 5);
    CHECK(checkpoint.names("mtp.") == std::vector<std::string>{"mtp.norm.weight"});
    CHECK(checkpoint.stored_name("norm.weight") == prefix + "norm.weight");
    CHECK(checkpoint.stored_name("lm_head.weight") == "lm_head.weight");
  }
  CHECK_THROWS_AS(
      Checkpoint::from_memory({{"model.norm.weight", scalar()}, {"model.language_model.norm.weight", scalar()}}),
      InvalidArgument);
}

TEST_CASE("a tensor that is missing or has another shape is named with both shapes") {
  std::array<float, 6> data{};
  const Checkpoint checkpoint =
      Checkpoint::from_memory({{"model.embed_tokens.weight", make_view(data.data(), DType::f32, {2, 3})}});
  CHECK(get(checkpoint, "embed_tokens.weight", {2, 3}).view.data == data.data());
  CHECK_THROWS_WITH_AS(get(checkpoint, "embed_tokens.weight", {3, 2}),
                       "the tensors in memory: the tensor model.embed_tokens.weight has shape [2, 3], wanted [3, 2]",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(get(checkpoint, "norm.weight", {3}),
                       "the tensors in memory: the tensor model.norm.weight is missing, wanted [3]", InvalidArgument);
  TensorView strided = make_view(data.data(), DType::f32, {3, 1});
  strided.stride[0] = 2;
  CHECK_THROWS_WITH_AS(Checkpoint::from_memory({{"x", strided}}), "the tensor x is not contiguous", InvalidArgument);
}

TEST_CASE("a folder is opened by its single file or its index") {
  CHECK(get(Checkpoint::open(kParity / "qwen3_tied/bf16"), "norm.weight", {64}).view.dtype == DType::bf16);
  CHECK(get(Checkpoint::open(kParity / "qwen3_moe/fp32"), "lm_head.weight", {256, 64}).view.dtype == DType::f32);
  CHECK_FALSE(Checkpoint::open(kParity / "qwen3_5_mtp/fp32").has("visual.pos_embed.weight"));
}

TEST_CASE("a folder without a checkpoint is refused") {
  const test::TempDir dir;
  const std::string path = dir.path().string();
  CHECK_THROWS_WITH_AS(Checkpoint::open(dir.path()),
                       (path + " has neither model.safetensors nor model.safetensors.index.json").c_str(),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(Checkpoint::open(dir.path() / "none"), (path + "/none does not exist").c_str(), InvalidArgument);
  const auto file = dir.write("model.bin", "x");
  CHECK_THROWS_WITH_AS(Checkpoint::open(file), (file.string() + " is not a folder").c_str(), InvalidArgument);
}

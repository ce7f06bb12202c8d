#include "cpp/src/models/mtp_module.h"

#include <cmath>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/dense_draft.h"
#include "tests_cpp/support/on_device.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::has_gpu;
using test::kGpu;
using test::make_tiny_model;
using test::TinyModel;
using Tokens = std::vector<std::int32_t>;

namespace {

struct Loaded {
  std::shared_ptr<const DecoderWeights> weights;
  std::shared_ptr<const MtpWeights> mtp;
};

Loaded load(const TinyModel& model) {
  const Checkpoint checkpoint = Checkpoint::from_memory(model.tensors);
  auto weights = load_decoder_weights(model.config, checkpoint);
  auto mtp = load_mtp_weights(model.config, checkpoint, *weights);
  return {std::move(weights), std::move(mtp)};
}

DenseDraftOutput draft(const TinyModel& model, const Tokens& tokens, std::int32_t next, int num_drafts) {
  ThreadPool threads(2);
  const auto [weights, mtp] = load(model);
  return dense_draft(model.config, weights, mtp, {.device = {}, .stream = {}, .threads = &threads}, tokens, next,
                     num_drafts);
}

}  // namespace

TEST_CASE("drafts are finite, differ by token, and a longer chain begins with a shorter one") {
  for (const Architecture architecture : {Architecture::qwen3_next, Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture, {.mtp = true});
    const auto one = draft(model, {1, 2, 3, 4, 5}, 6, 1), three = draft(model, {1, 2, 3, 4, 5}, 6, 3);
    for (const float logit : three.logits) REQUIRE(std::isfinite(logit));
    CHECK(Tokens(three.token_ids.begin(), three.token_ids.begin() + 1) == one.token_ids);
    CHECK(std::equal(one.logits.begin(), one.logits.end(), three.logits.begin()));
    CHECK(three.hidden.size() == static_cast<std::size_t>(5 * model.config.hidden_size));
    CHECK(draft(model, {1, 2, 3, 4, 5}, 7, 1).logits != one.logits);
    CHECK(draft(model, {9, 2, 3, 4, 5}, 6, 1).logits != one.logits);
  }
}

TEST_CASE("a chain on the device gives the CPU's logits and drafts [sanitizer]") {
  if (!has_gpu()) return;
  ThreadPool threads(1);
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture, {.mtp = true});
    const Tokens tokens = {1, 2, 3, 4, 5, 9, 17, 3, 3, 8, 60, 2, 1, 0, 5, 6, 7, 30, 31};
    const auto expected = draft(model, tokens, 6, 3);
    const Checkpoint checkpoint = Checkpoint::from_memory(model.tensors);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const WeightPlacement placement{.device = kGpu, .dtype = dtype};
      const auto weights = load_decoder_weights(model.config, checkpoint, placement);
      const auto mtp = load_mtp_weights(model.config, checkpoint, *weights);
      CHECK(mtp->fc.view.dtype == dtype);
      const cuda::Stream stream;
      const auto matmul = cuda::make_matmul(kGpu.index);
      const ops::Context ctx{.device = kGpu, .stream = {stream.handle()}, .threads = &threads, .matmul = matmul.get()};
      const auto actual = dense_draft(model.config, weights, mtp, ctx, tokens, 6, 3);
      const float tolerance = dtype == DType::f32 ? 1e-3F : 0.3F;
      if (dtype == DType::f32) CHECK(actual.token_ids == expected.token_ids);
      REQUIRE(actual.hidden.size() == expected.hidden.size());
      for (int i = 0; i < model.config.vocab_size; ++i)
        REQUIRE(std::fabs(actual.logits[static_cast<std::size_t>(i)] - expected.logits[static_cast<std::size_t>(i)]) <
                tolerance * (1.0F + std::fabs(expected.logits[static_cast<std::size_t>(i)])));
    }
  }
}

TEST_CASE("random weights have the module that the config names") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5_moe, {.mtp = true});
  ModelConfig config = model.config;
  config.num_mtp_layers = 1;
  ThreadPool threads(1);
  const auto weights = make_dummy_weights(config, {}, 3);
  const auto mtp = make_dummy_mtp_weights(config, *weights, 3);
  const auto drafts = dense_draft(config, weights, mtp, {.device = {}, .stream = {}, .threads = &threads},
                                  std::vector<std::int32_t>{1, 2, 3}, 4, 2);
  for (const float logit : drafts.logits) REQUIRE(std::isfinite(logit));
  config.num_mtp_layers = 0;
  CHECK_THROWS_WITH_AS(make_dummy_mtp_weights(config, *weights, 3), doctest::Contains("mtp_num_hidden_layers 0"),
                       Unsupported);
}

TEST_CASE("a checkpoint without the module, or with more than one layer, is refused") {
  const TinyModel without = make_tiny_model(Architecture::qwen3_5);
  CHECK_THROWS_WITH_AS(load(without), doctest::Contains("0 layers of a draft module"), Unsupported);
  TinyModel two = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  two.set("mtp.layers.1.input_layernorm.weight", {32}, std::vector<float>(32));
  CHECK_THROWS_WITH_AS(load(two), doctest::Contains("2 layers of a draft module"), Unsupported);
  TinyModel partial = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  partial.tensors.erase("mtp.fc.weight");
  CHECK_THROWS_WITH_AS(load(partial), doctest::Contains("mtp.fc.weight is missing"), InvalidArgument);
}

TEST_CASE("a chain of no drafts is refused") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  CHECK_THROWS_AS(draft(model, {1, 2}, 3, 0), InvalidArgument);
}

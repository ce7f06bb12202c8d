#include <algorithm>
#include <cmath>
#include <cstring>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/dense_forward.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;

namespace {

std::vector<float> logits_of(const ModelConfig& config, DType dtype, std::uint64_t seed) {
  ThreadPool threads(2);
  const ops::Context ctx{.device = {}, .stream = {}, .threads = &threads};
  const std::vector<std::int32_t> tokens{1, 2, 3, 4, 5, 6, 7};
  return dense_forward(config, make_dummy_weights(config, {.device = {}, .dtype = dtype}, seed), ctx, tokens, false, {})
      .logits;
}

}  // namespace

TEST_CASE("dummy weights follow from their seed and give finite logits") {
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_moe, Architecture::qwen3_next,
                                          Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    CAPTURE(name(architecture));
    const ModelConfig config = test::make_tiny_model(architecture, {.attention_bias = true}).config;
    const auto logits = logits_of(config, DType::f32, 1);
    CHECK(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }));
    CHECK(std::any_of(logits.begin(), logits.end(), [](float x) { return std::fabs(x) > 0.01F; }));
    CHECK(logits == logits_of(config, DType::f32, 1));
    CHECK(logits != logits_of(config, DType::f32, 2));
    for (const auto& [dtype, limit] : {std::pair{DType::bf16, 0.02}, {DType::f16, 0.0025}}) {
      const auto rounded = logits_of(config, dtype, 1);
      double difference = 0.0, norm = 0.0;
      for (std::size_t i = 0; i < logits.size(); ++i)
        difference += std::pow(rounded[i] - logits[i], 2), norm += std::pow(logits[i], 2);
      CHECK(std::sqrt(difference / norm) < limit);
      CHECK(difference > 0.0);
    }
  }
}

TEST_CASE("dummy weights have the spread of trained ones") {
  const ModelConfig config = test::make_tiny_model(Architecture::qwen3_5, {.tied = true}).config;
  const auto weights = make_dummy_weights(config, {.device = {}, .dtype = DType::f32}, 3);
  CHECK(weights->head.view.data == weights->embedding.view.data);
  double sum = 0.0, squares = 0.0;
  const std::int64_t count = weights->embedding.view.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = weights->embedding.view.as<float>()[i];
    sum += value, squares += value * value;
  }
  CHECK(std::fabs(sum / static_cast<double>(count)) < 0.002);
  CHECK(std::sqrt(squares / static_cast<double>(count)) == doctest::Approx(0.02).epsilon(0.05));
  for (int i = 0; i < 32; ++i) CHECK(std::fabs(weights->final_norm.as<float>()[i] - 1.0F) <= 0.1F);
  const auto& layer = std::get<GatedDeltaNet>(weights->layers[0].mixer);
  for (int i = 0; i < 4; ++i) CHECK(std::fabs(layer.dt_bias.as<float>()[i] + 4.0F) <= 3.0F);
  CHECK(std::memcmp(weights->layers[0].input_norm.as<float>(), weights->layers[1].input_norm.as<float>(), 128) != 0);
}

// On the random Qwen3-Omni checkpoint of tests_py/data/speech, whose goldens the Python tests compare with.

#include <cmath>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/stages/code_predictor.h"
#include "cpp/src/stages/codec_decoder.h"
#include "cpp/src/stages/stage_tensors.h"

using namespace deltaic;

namespace {

constexpr int kCodebooks = 4, kCodes = 64, kWidth = 32;

StoredTensors part(const char* prefix) {
  static const StoredTensors all = open_stage_tensors(DELTAIC_SOURCE_DIR "/tests_py/data/speech/omni");
  return part_of(all, prefix);
}

CodecConfig codec_config() {
  return {.transformer = {.hidden_size = kWidth,
                          .num_layers = 2,
                          .num_heads = 4,
                          .num_kv_heads = 4,
                          .head_dim = 8,
                          .intermediate_size = 48,
                          .sliding_window = 8},
          .num_codebooks = kCodebooks,
          .codebook_size = kCodes,
          .codebook_dim = 0,
          .latent_dim = kWidth,
          .decoder_dim = 32,
          .upsampling_ratios = {2, 2},
          .upsample_rates = {8, 5, 4, 3}};
}

CodePredictorConfig predictor_config() {
  ModelConfig decoder;
  decoder.vocab_size = kCodes, decoder.hidden_size = kWidth, decoder.intermediate_size = 48, decoder.num_layers = 2;
  decoder.layer_kinds.assign(2, LayerKind::full_attention), decoder.is_moe_layer.assign(2, false);
  decoder.num_heads = 4, decoder.num_kv_heads = 2, decoder.head_dim = 8, decoder.rotary_dim = 8;
  return {.decoder = decoder, .num_codebooks = kCodebooks, .talker_hidden_size = kWidth};
}

// Different numbers in [-1, 1].
Tensor spread(std::int64_t rows, float shift) {
  Tensor tensor(DType::f32, {rows, kWidth});
  for (std::int64_t i = 0; i < rows * kWidth; ++i)
    tensor.as<float>()[i] = static_cast<float>((i * 37) % 101) / 50.0F - 1.0F + shift;
  return tensor;
}

struct Prediction {
  std::vector<std::int32_t> codes;
  std::vector<float> sum;
  friend bool operator==(const Prediction&, const Prediction&) = default;
};

// Rows [begin, end) of the same inputs.
Prediction predict(CodePredictor& predictor, std::span<const CodeRow> rows, std::int64_t begin, std::int64_t end) {
  const Tensor hidden = spread(8, 0.0F), first = spread(8, 0.1F);
  Tensor codes(DType::i32, {end - begin, kCodebooks - 1}), sum(DType::f32, {end - begin, kWidth});
  const auto finite = predictor.predict(
      hidden.view().slice(begin, end), first.view().slice(begin, end),
      rows.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)), codes.view(), sum.view());
  for (const bool is_finite : finite) CHECK(is_finite);
  return {.codes = {codes.as<std::int32_t>(), codes.as<std::int32_t>() + codes.view().numel()},
          .sum = {sum.as<float>(), sum.as<float>() + sum.view().numel()}};
}

}  // namespace

TEST_CASE("a decoder gives the same samples in any pieces, as many as its formula says") {
  CodecDecoder codec(codec_config(), part("code2wav."), 2);
  constexpr int kFrames = 20;
  std::vector<std::int32_t> codes(kFrames * kCodebooks);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::int32_t>(i * 37 % kCodes);
  auto stream = codec.start();
  const std::vector<float> whole = codec.decode(stream, codes);
  CHECK(static_cast<std::int64_t>(whole.size()) == codec.num_samples(kFrames));
  CHECK(codec.num_samples(kFrames) == 1920 * kFrames - 555);
  for (const int size : {1, 3, 19}) {
    CAPTURE(size);
    auto pieces = codec.start();
    std::vector<float> samples;
    for (int begin = 0; begin < kFrames; begin += size) {
      const int end = std::min(begin + size, kFrames);
      const auto frames = std::span(codes).subspan(static_cast<std::size_t>(begin * kCodebooks),
                                                   static_cast<std::size_t>((end - begin) * kCodebooks));
      auto other = pieces;  // a copy goes on by itself
      codec.decode(other, std::span(codes).first(kCodebooks));
      const auto more = codec.decode(pieces, frames);
      samples.insert(samples.end(), more.begin(), more.end());
    }
    CHECK(samples == whole);
    CHECK(pieces.num_samples() == static_cast<std::int64_t>(whole.size()));
  }
}

TEST_CASE("a code out of range is refused, and the stream is as before") {
  CodecDecoder codec(codec_config(), part("code2wav."), 2);
  const std::vector<std::int32_t> good{1, 2, 3, 4}, bad{1, 2, 3, 4, 5, 6, kCodes, 7}, torn{1, 2, 3};
  auto stream = codec.start(), untouched = codec.start();
  CHECK_THROWS_AS(codec.decode(stream, bad), InvalidArgument);
  CHECK_THROWS_AS(codec.decode(stream, torn), InvalidArgument);
  CHECK(stream.num_frames() == 0);
  CHECK(codec.decode(stream, good) == codec.decode(untouched, good));
}

TEST_CASE("a codec that makes no samples of a frame is refused") {
  for (const auto rates : {&CodecConfig::upsampling_ratios, &CodecConfig::upsample_rates}) {
    CodecConfig config = codec_config();
    (config.*rates)[1] = 0;
    CHECK_THROWS_WITH_AS(CodecDecoder(config, part("code2wav."), 1), doctest::Contains("hold 0"), InvalidArgument);
  }
}

TEST_CASE("a row's codes depend on its seed and frame, and on no other row") {
  ThreadPool threads(2);
  const ops::Context ctx{.device = {}, .stream = {}, .threads = &threads};
  CodePredictor predictor(predictor_config(), part("talker.code_predictor."), ctx, 8);
  std::vector<CodeRow> rows;
  for (std::uint64_t i = 0; i < 8; ++i)
    rows.push_back({.sampling = {.do_sample = i % 2 == 0, .temperature = 1.5F}, .seed = 7 + i, .frame = 3 * i});
  const Prediction together = predict(predictor, rows, 0, 8);
  for (std::int64_t i = 0; i < 8; ++i) {
    const Prediction alone = predict(predictor, rows, i, i + 1);
    CHECK(std::equal(alone.codes.begin(), alone.codes.end(), together.codes.begin() + i * (kCodebooks - 1)));
    CHECK(std::equal(alone.sum.begin(), alone.sum.end(), together.sum.begin() + i * kWidth));
  }
  for (CodeRow& row : rows) row.frame += 1;
  const Prediction next = predict(predictor, rows, 0, 8);
  CHECK(next.codes != together.codes);
  for (int i = 1; i < 8; i += 2)  // the greedy ones stay
    for (int j = 0; j + 1 < kCodebooks; ++j)
      CHECK(next.codes[static_cast<std::size_t>(i * (kCodebooks - 1) + j)] ==
            together.codes[static_cast<std::size_t>(i * (kCodebooks - 1) + j)]);
}

TEST_CASE("a row whose logits are not finite is told, and the others are unharmed") {
  ThreadPool threads(2);
  const ops::Context ctx{.device = {}, .stream = {}, .threads = &threads};
  CodePredictor predictor(predictor_config(), part("talker.code_predictor."), ctx, 2);
  const std::vector<CodeRow> rows(2, CodeRow{.sampling = {.do_sample = false}});
  Tensor hidden = spread(2, 0.0F);
  const Tensor first = spread(2, 0.1F);
  Tensor codes(DType::i32, {2, kCodebooks - 1}), sum(DType::f32, {2, kWidth});
  predictor.predict(hidden.view(), first.view(), rows, codes.view(), sum.view());
  const std::vector<std::int32_t> before(codes.as<std::int32_t>() + 3, codes.as<std::int32_t>() + 6);
  hidden.as<float>()[0] = NAN;
  CHECK(predictor.predict(hidden.view(), first.view(), rows, codes.view(), sum.view()) ==
        std::vector<bool>{false, true});
  CHECK(std::vector<std::int32_t>(codes.as<std::int32_t>() + 3, codes.as<std::int32_t>() + 6) == before);
}

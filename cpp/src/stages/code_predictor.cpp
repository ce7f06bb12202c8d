#include "cpp/src/stages/code_predictor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include <deltaic/error.h>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/models/weight_reader.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/gumbel_argmax.h"
#include "cpp/src/ops/logits_row.h"
#include "cpp/src/ops/top_k_top_p.h"
#include "cpp/src/stages/stage_tensors.h"

namespace deltaic {

namespace {

// Parts the predictor's random numbers from those that the talker draws with the same seed.
constexpr std::uint64_t kPredictorStream = 0x9E3779B97F4A7C15ULL;

CodePredictorConfig checked(const CodePredictorConfig& config) {
  DELTAIC_CHECK(config.num_codebooks >= 2, "num_codebooks is ", config.num_codebooks, ", it must be at least 2");
  if (config.decoder.num_layers_of(LayerKind::linear_attention) > 0)
    throw Unsupported("a code predictor with recurrent layers");
  return config;
}

std::int32_t choose(std::span<const float> logits, float max_logit, const CodeRow& row, std::uint64_t position) {
  if (!row.sampling.do_sample) return ops::first_index_of(logits, max_logit);
  const SamplingParams params{
      .temperature = row.sampling.temperature, .top_p = row.sampling.top_p, .top_k = row.sampling.top_k};
  const ops::NoiseKey key{row.seed ^ kPredictorStream, position};
  return ops::draw(ops::filter_candidates(logits, max_logit, params), max_logit, params.temperature, key);
}

}  // namespace

void validate(const CodeSampling& sampling) {
  DELTAIC_CHECK(sampling.temperature >= 0.01F && sampling.temperature <= 2.0F, "temperature of the residual codes is ",
                sampling.temperature, ", outside [0.01, 2]");
  DELTAIC_CHECK(sampling.top_k >= 0, "top_k of the residual codes is ", sampling.top_k, ", below 0");
  DELTAIC_CHECK(sampling.top_p > 0.0F && sampling.top_p <= 1.0F, "top_p of the residual codes is ", sampling.top_p,
                ", outside (0, 1]");
}

struct CodePredictor::Impl {
  Impl(const CodePredictorConfig& predictor_config, const StoredTensors& tensors, const ops::Context& context,
       int max_num_rows)
      : config(checked(predictor_config)),
        ctx(context),
        max_batch(max_num_rows),
        checkpoint(Checkpoint::from_stored(as_text_model(tensors, "lm_head.0.weight", "lm_head.0.weight"),
                                           "the code predictor")),
        decoder(config.decoder, load_decoder_weights(config.decoder, checkpoint), ctx,
                {.max_num_tokens = 2 * max_batch, .max_num_seqs = max_batch}) {
    ViewReader reader(checkpoint);
    const std::int64_t codes = config.decoder.vocab_size, width = config.decoder.hidden_size;
    for (int i = 0; i + 1 < config.num_codebooks; ++i) {
      embeddings.push_back(reader.matrix("codec_embedding." + std::to_string(i) + ".weight", codes, talker_width()));
      heads.push_back(reader.matrix("lm_head." + std::to_string(i) + ".weight", codes, width));
    }
    if (reader.has("small_to_mtp_projection.weight")) {
      projection.weight = reader.matrix("small_to_mtp_projection.weight", width, talker_width());
      projection.bias = reader.values("small_to_mtp_projection.bias", {width});
    } else {
      DELTAIC_CHECK(width == talker_width(), "the code predictor is ", width, " wide, the talker ", talker_width(),
                    ", and there is no small_to_mtp_projection");
    }
    num_bytes = reader.num_bytes();
    for (int i = 0; i < config.decoder.num_layers; ++i) {
      const auto cache = [&] {
        return memory
            .emplace_back(DType::f32,
                          std::initializer_list<std::int64_t>{max_batch, config.num_codebooks,
                                                              config.decoder.num_kv_heads, config.decoder.head_dim})
            .view();
      };
      const TensorView k = cache();
      caches.push_back({.k = k, .v = cache()});
    }
    for (int i = 0; i < max_batch; ++i) block_table.push_back(i);
    inputs = Tensor(DType::f32, {2 * max_batch, talker_width()});
    projected = Tensor(DType::f32, {2 * max_batch, width});
    last = Tensor(DType::f32, {max_batch, width});
    logits = Tensor(DType::f32, {max_batch, codes});
    input_ids.assign(static_cast<std::size_t>(2 * max_batch), 0);
  }

  std::int64_t talker_width() const { return config.talker_hidden_size; }
  // Runs `span` tokens a row, the first at `position`, from inputs; leaves each row's last hidden state in `last`.
  void forward(std::int64_t num_rows, int span, int position);
  void sample(int codebook, std::span<const CodeRow> rows, TensorView codes, std::vector<bool>& is_finite);

  CodePredictorConfig config;
  ops::Context ctx;
  int max_batch;
  Checkpoint checkpoint;
  HybridDecoder decoder;
  std::vector<ops::Weight> embeddings, heads;  // [Q - 1]
  StageLinear projection;
  std::int64_t num_bytes = 0;

  std::vector<Tensor> memory;
  std::vector<AttentionCacheViews> caches;  // a block of Q tokens a row
  std::vector<std::int32_t> input_ids, block_table, query_start_loc, seq_lens, code_ids;
  std::vector<std::int64_t> positions, slot_mapping;
  Tensor inputs;     // [2 * max_batch, talker width]
  Tensor projected;  // [2 * max_batch, width]
  Tensor last;       // [max_batch, width]
  Tensor logits;     // [max_batch, codes]
};

void CodePredictor::Impl::forward(std::int64_t num_rows, int span, int position) {
  const std::int64_t num_tokens = num_rows * span;
  positions.clear(), slot_mapping.clear(), query_start_loc.assign(1, 0);
  seq_lens.assign(static_cast<std::size_t>(num_rows), position + span);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (int i = 0; i < span; ++i) {
      positions.push_back(position + i);
      slot_mapping.push_back(row * config.num_codebooks + position + i);
    }
    query_start_loc.push_back(static_cast<std::int32_t>((row + 1) * span));
  }
  TensorView embeds = inputs.view().slice(0, num_tokens);
  if (projection.weight.is_set()) {
    projection.forward(ctx, embeds, projected.view().slice(0, num_tokens));
    embeds = projected.view().slice(0, num_tokens);
  }
  const ForwardInputs step{.input_ids = make_view(input_ids.data(), DType::i32, {num_tokens}),
                           .positions = make_view(positions.data(), DType::i64, {1, num_tokens}),
                           .query_start_loc = make_view(query_start_loc.data(), DType::i32, {num_rows + 1}),
                           .seq_lens = make_view(seq_lens.data(), DType::i32, {num_rows}),
                           .block_table = make_view(block_table.data(), DType::i32, {num_rows, 1}),
                           .slot_mapping = make_view(slot_mapping.data(), DType::i64, {num_tokens}),
                           .gdn = {},
                           .inputs_embeds = embeds};
  const TensorView hidden = decoder.forward(step, {.attention = caches, .state = {}});
  const std::int64_t width = config.decoder.hidden_size;
  for (std::int64_t row = 0; row < num_rows; ++row)
    std::memcpy(last.as<float>() + row * width, hidden.as<float>() + ((row + 1) * span - 1) * width,
                static_cast<std::size_t>(width) * sizeof(float));
}

void CodePredictor::Impl::sample(int codebook, std::span<const CodeRow> rows, TensorView codes,
                                 std::vector<bool>& is_finite) {
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  const std::int64_t num_codes = config.decoder.vocab_size;
  ops::linear(ctx, last.view().slice(0, num_rows), heads[static_cast<std::size_t>(codebook)],
              logits.view().slice(0, num_rows));
  code_ids.clear();
  for (std::int64_t i = 0; i < num_rows; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const std::span<const float> row(logits.as<float>() + i * num_codes, static_cast<std::size_t>(num_codes));
    const ops::RowMax max = ops::row_max(row);
    if (!max.is_finite) is_finite[index] = false;
    const std::uint64_t position =
        rows[index].frame * static_cast<std::uint64_t>(config.num_codebooks) + static_cast<std::uint64_t>(codebook);
    code_ids.push_back(is_finite[index] ? choose(row, max.value, rows[index], position) : 0);
    codes.as<std::int32_t>()[i * codes.stride[0] + codebook] = code_ids.back();
  }
}

std::vector<bool> CodePredictor::predict(TensorView hidden, TensorView first_code, std::span<const CodeRow> rows,
                                         TensorView codes, TensorView sum) {
  Impl& self = *impl_;
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  const std::int64_t width = self.talker_width();
  const int num_residual = self.config.num_codebooks - 1;
  DELTAIC_CHECK(num_rows <= self.max_batch, num_rows, " rows, the most is ", self.max_batch);
  for (const auto& [name, view] : {std::pair{"hidden", hidden}, {"first_code", first_code}, {"sum", sum}})
    DELTAIC_CHECK(view.dtype == DType::f32 && view.rank == 2 && view.shape[0] == num_rows && view.shape[1] == width &&
                      view.is_contiguous(),
                  name, " is not contiguous f32 [", num_rows, ", ", width, "]");
  DELTAIC_CHECK(codes.dtype == DType::i32 && codes.rank == 2 && codes.shape[0] == num_rows &&
                    codes.shape[1] == num_residual && codes.stride[1] == 1,
                "codes are not i32 [", num_rows, ", ", num_residual, "]");
  std::vector<bool> is_finite(rows.size(), true);
  if (num_rows == 0) return is_finite;

  const auto row_bytes = static_cast<std::size_t>(width) * sizeof(float);
  for (std::int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(self.inputs.as<float>() + 2 * i * width, hidden.as<float>() + i * width, row_bytes);
    std::memcpy(self.inputs.as<float>() + (2 * i + 1) * width, first_code.as<float>() + i * width, row_bytes);
  }
  std::memcpy(sum.data, first_code.data, sum.num_bytes());
  self.forward(num_rows, 2, 0);
  for (int codebook = 0; codebook < num_residual; ++codebook) {
    self.sample(codebook, rows, codes, is_finite);
    const TensorView next = self.inputs.view().slice(0, num_rows);
    ops::embedding(self.ctx, make_view(self.code_ids.data(), DType::i32, {num_rows}),
                   self.embeddings[static_cast<std::size_t>(codebook)], next);
    for (std::int64_t i = 0; i < num_rows * width; ++i) sum.as<float>()[i] += next.as<float>()[i];
    if (codebook + 1 < num_residual) self.forward(num_rows, 1, codebook + 2);
  }
  return is_finite;
}

CodePredictor::CodePredictor(const CodePredictorConfig& config, const StoredTensors& tensors, const ops::Context& ctx,
                             int max_batch) {
  DELTAIC_CHECK(max_batch > 0, "max_batch is ", max_batch, ", it must be above 0");
  impl_ = std::make_unique<Impl>(config, tensors, ctx, max_batch);
}
CodePredictor::~CodePredictor() = default;
CodePredictor::CodePredictor(CodePredictor&&) noexcept = default;

const ops::Weight& CodePredictor::embedding(int i) const { return impl_->embeddings.at(static_cast<std::size_t>(i)); }
const CodePredictorConfig& CodePredictor::config() const { return impl_->config; }
std::int64_t CodePredictor::num_bytes() const { return impl_->num_bytes; }

}  // namespace deltaic

#include "cpp/src/ops/sampler.h"

#include <deltaic/error.h>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/gumbel_argmax.h"
#include "cpp/src/ops/logits_processors.h"
#include "cpp/src/ops/logits_row.h"

namespace deltaic::ops {
namespace {

void check_row(const Context& ctx, const SamplerRow& row, std::size_t index) {
  DELTAIC_CHECK(row.params != nullptr, "row ", index, " of the sampler has no sampling parameters");
  DELTAIC_CHECK(row.logits.dtype == DType::f32, "row ", index, ": logits are ", name(row.logits.dtype), ", not f32");
  DELTAIC_CHECK(row.logits.rank == 1 && row.logits.shape[0] > 0 && row.logits.is_contiguous(), "row ", index,
                ": logits must be [vocab_size] and contiguous, have rank ", row.logits.rank, " and ",
                row.logits.shape[0], " elements");
  DELTAIC_CHECK(row.logits.device == ctx.device, "row ", index, ": logits are on another device than the sampler");
}

std::int32_t choose(std::span<const float> logits, float max_logit, const SamplerRow& row) {
  const SamplingParams& params = *row.params;
  if (params.is_greedy()) return first_index_of(logits, max_logit);
  const NoiseKey key{row.seed, row.output_token_ids.size()};
  if (has_top_k(params, logits.size()) || has_top_p(params))
    return draw(filter_candidates(logits, max_logit, params), max_logit, params.temperature, key);
  return draw(logits, max_logit, params.temperature, min_p_threshold(max_logit, params.temperature, params.min_p), key);
}

// `raw` and `counts` are scratch.
SampledToken sample_row(const SamplerRow& row, std::vector<float>& raw, std::vector<std::int32_t>& counts) {
  const std::span<float> logits(row.logits.as<float>(), static_cast<std::size_t>(row.logits.shape[0]));
  const SamplingParams& params = *row.params;
  RowMax max = row_max(logits);
  if (!max.is_finite) return {.token_id = 0, .is_finite = false, .logprobs = std::nullopt};

  std::span<const float> raw_logits = logits;
  if (needs_processing(params, row.output_token_ids.size())) {
    if (params.logprobs) {
      raw.assign(logits.begin(), logits.end());
      raw_logits = raw;
    }
    process_logits(logits, params, row.prompt_token_ids, row.output_token_ids, counts);
    max = row_max(logits);
    if (!max.is_finite) return {.token_id = 0, .is_finite = false, .logprobs = std::nullopt};
  }
  SampledToken result;
  result.token_id = choose(logits, max.value, row);
  if (params.logprobs) result.logprobs = token_logprobs(raw_logits, result.token_id, *params.logprobs);
  return result;
}

}  // namespace

std::vector<SampledToken> sample(const Context& ctx, std::span<const SamplerRow> rows) {
  if (ctx.device.type != DeviceType::cpu) throw Unsupported("sampling on CUDA is not supported: sample on the CPU");
  for (std::size_t i = 0; i < rows.size(); ++i) check_row(ctx, rows[i], i);
  std::vector<SampledToken> result(rows.size());
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> raw;
    std::vector<std::int32_t> counts;
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
      result[i] = sample_row(rows[i], raw, counts);
  };
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  if (ctx.threads == nullptr) {
    body(0, num_rows);
  } else {
    ctx.threads->parallel_for(num_rows, 1, body);
  }
  return result;
}

}  // namespace deltaic::ops

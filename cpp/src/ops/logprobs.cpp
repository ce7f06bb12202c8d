#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/logits_row.h"
#include "cpp/src/ops/sampler.h"
#include "cpp/src/ops/top_k_top_p.h"

namespace deltaic::ops {
namespace {

// The `count` best tokens in order; masked ones come last, by id.
std::vector<Candidate> best_in_order(std::span<const float> logits, std::size_t count) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  std::vector<Candidate> best = select_best(logits, count, kMasked);
  std::sort(best.begin(), best.end(), is_better);
  for (std::size_t i = 0; i < logits.size() && best.size() < count; ++i)
    if (logits[i] == kMasked) best.push_back({kMasked, static_cast<std::int32_t>(i)});
  return best;
}

}  // namespace

bool is_finite(std::span<const float> logits) { return row_max(logits).is_finite; }

TokenLogprobs token_logprobs(std::span<const float> logits, std::int32_t token_id, int num_logprobs) {
  const auto vocab_size = static_cast<std::int64_t>(logits.size());
  DELTAIC_CHECK(token_id >= 0 && token_id < vocab_size, "token id ", token_id, " is outside the vocabulary [0, ",
                vocab_size, ")");
  DELTAIC_CHECK(num_logprobs >= -1, "num_logprobs is ", num_logprobs, "; it must be >= -1 (-1: the whole vocabulary)");
  const RowMax max = row_max(logits);
  DELTAIC_CHECK(max.is_finite, "a row of logits has a NaN, +inf or no finite element: it has no log probabilities");
  const double log_sum =
      max.value + std::log(sum_exp(logits, max.value, 1.0F, -std::numeric_limits<float>::infinity()));
  const std::int64_t count = num_logprobs < 0 ? vocab_size : std::min<std::int64_t>(num_logprobs, vocab_size);

  TokenLogprobs result;
  result.token_ids.reserve(static_cast<std::size_t>(count) + 1);
  result.logprobs.reserve(static_cast<std::size_t>(count) + 1);
  const auto append = [&](const Candidate& c) {
    result.token_ids.push_back(c.token_id);
    result.logprobs.push_back(static_cast<float>(c.logit - log_sum));
  };
  const float logit = logits[static_cast<std::size_t>(token_id)];
  append({logit, token_id});
  for (const Candidate& c : best_in_order(logits, static_cast<std::size_t>(count))) append(c);
  result.rank = static_cast<int>(count_above(logits, logit)) + 1;
  return result;
}

std::vector<std::optional<TokenLogprobs>> token_logprobs(const Context& ctx, TensorView logits,
                                                         std::span<const std::int32_t> token_ids, int num_logprobs) {
  if (ctx.device.type != DeviceType::cpu) throw Unsupported("log probabilities on CUDA are not supported");
  DELTAIC_CHECK(logits.rank == 2 && logits.dtype == DType::f32 && logits.device == ctx.device && logits.stride[1] == 1,
                "logits must be [num_rows, vocab_size] f32 with contiguous rows on the op's device, are ",
                name(logits.dtype), " of rank ", logits.rank);
  DELTAIC_CHECK(logits.shape[0] == static_cast<std::int64_t>(token_ids.size()), "logits have ", logits.shape[0],
                " rows, and there are ", token_ids.size(), " token ids");
  const float* data = logits.as<float>();
  const auto vocab_size = static_cast<std::size_t>(logits.shape[1]);
  std::vector<std::optional<TokenLogprobs>> result(token_ids.size());
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::span<const float> row(data + i * logits.stride[0], vocab_size);
      const auto index = static_cast<std::size_t>(i);
      if (is_finite(row)) result[index] = token_logprobs(row, token_ids[index], num_logprobs);
    }
  };
  if (ctx.threads == nullptr) {
    body(0, logits.shape[0]);
  } else {
    ctx.threads->parallel_for(logits.shape[0], 1, body);
  }
  return result;
}

}  // namespace deltaic::ops

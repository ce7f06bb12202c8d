#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <deltaic/sampling_params.h>
#include <deltaic/scheduler_output.h>

#include "cpp/src/ops/context.h"

namespace deltaic::ops {

// The logits that a request's newest token and the drafts behind it gave, and the request.
struct DraftRow {
  TensorView logits{};  // [1 + num_drafts, vocab_size] f32, contiguous; changed in place
  const SamplingParams* params = nullptr;
  std::span<const std::int32_t> prompt_token_ids{};
  std::span<const std::int32_t> output_token_ids{};  // generated so far, and behind them the drafts
  int num_drafts = 0;
  std::uint64_t seed = 0;
};

struct VerifiedTokens {
  // 1 + (accepted drafts): the drafts up to the first that is wrong, and the token that stands there instead; when all
  // are right, the token behind them. Empty where is_finite is false.
  std::vector<std::int32_t> token_ids{};
  std::vector<TokenLogprobs> logprobs{};  // one a token, when params->logprobs is set
  // False where logits that decide a token are not finite (SampledToken); the other rows are unharmed.
  bool is_finite = true;
};

// Chooses the tokens of each row as ops::sample chooses them one by one: position j with the context output + drafts
// before j, by the noise of its own output position. A draft is accepted when it is the token chosen at its position,
// so the tokens are those of sampling without drafts, bit for bit, whatever the drafts are. In law this is rejection
// sampling against drafts that are given: a draft x is accepted with probability p(x), and else the token comes from p
// without x.
// A draft outside the vocabulary (-1: a placeholder) is never accepted, and neither it nor what is behind it is read.
// Rows run on ctx.threads, or in the caller where that is null. Throws InvalidArgument for a row that does not fit,
// Unsupported on CUDA.
std::vector<VerifiedTokens> verify_drafts(const Context& ctx, std::span<const DraftRow> rows);

}  // namespace deltaic::ops

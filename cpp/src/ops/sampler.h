#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <deltaic/sampling_params.h>
#include <deltaic/scheduler_output.h>

#include "cpp/src/ops/context.h"

namespace deltaic::ops {

// One row of logits and the request it belongs to. The spans are views of the runner's rows.
struct SamplerRow {
  TensorView logits{};  // [vocab_size] f32, contiguous; changed in place
  const SamplingParams* params = nullptr;
  std::span<const std::int32_t> prompt_token_ids{};
  std::span<const std::int32_t> output_token_ids{};  // generated so far, drafts before this position included
  std::uint64_t seed = 0;                            // of the request: given by the user, or drawn once for it
};

struct SampledToken {
  std::int32_t token_id = 0;
  // False where the logits, as they came or after masks, have a NaN, +inf or no finite element; token_id is then 0 and
  // logprobs is empty.
  bool is_finite = true;
  std::optional<TokenLogprobs> logprobs{};  // when params->logprobs is set
};

// Chooses one token a row: process_logits() (logits_processors.h), then the likeliest token of a greedy row, or a draw
// from what temperature, min_p, top-k and top-p leave (top_k_top_p.h). Log probabilities are of the logits as they
// came. Output position of a row = output_token_ids.size(). Random numbers are a pure function of (seed, output
// position, vocabulary index): what a row gives does not depend on the other rows. Rows run on ctx.threads, or in the
// caller where that is null. The params must have passed validate() and all ids lie in the vocabulary. Throws
// InvalidArgument for a row that does not fit, Unsupported on CUDA.
std::vector<SampledToken> sample(const Context& ctx, std::span<const SamplerRow> rows);

// False for a row with a NaN or +inf, or without a finite element: nothing can be sampled from it, and it has no log
// probabilities.
bool is_finite(std::span<const float> logits);

// Raw log probabilities of `token_id` and the best `num_logprobs` (-1 or more than there are: all) of one row of
// logits, the lower id first where two are equal. The rank counts the tokens that are strictly better, from 1. Throws
// InvalidArgument where is_finite(logits) is false, and for an id outside the vocabulary.
TokenLogprobs token_logprobs(std::span<const float> logits, std::int32_t token_id, int num_logprobs);

// The same of many rows, on ctx.threads or in the caller; none for a row that is not finite.
//   logits     [num_rows, vocab_size] f32, rows contiguous, any row stride
//   token_ids  [num_rows]
// num_rows may be 0. Throws as above otherwise, and Unsupported on CUDA.
std::vector<std::optional<TokenLogprobs>> token_logprobs(const Context& ctx, TensorView logits,
                                                         std::span<const std::int32_t> token_ids, int num_logprobs);

}  // namespace deltaic::ops

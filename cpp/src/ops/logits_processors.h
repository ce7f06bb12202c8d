#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <deltaic/sampling_params.h>

namespace deltaic::ops {

// What changes the logits of one row before a token is chosen. Each works in place on [vocab_size] f32; a masked
// token's logit is -inf, and stays so. An id outside the vocabulary throws InvalidArgument.

// Masks all but `allowed`; an empty list allows all. Duplicates do no harm.
void mask_all_but(std::span<float> logits, std::span<const int> allowed);

// Masks the last token of each word whose other tokens are the newest of `output`, drafts before this position
// included.
void mask_bad_words(std::span<float> logits, const std::vector<std::vector<int>>& bad_words,
                    std::span<const std::int32_t> output);

// Masks `token_ids`.
void mask_tokens(std::span<float> logits, std::span<const int> token_ids);

void add_logit_bias(std::span<float> logits, const std::map<int, float>& bias);

// Repetition penalty r over the tokens of prompt and output: a positive logit is divided by r, another one multiplied.
// Then, over the output: minus frequency_penalty * count, minus presence_penalty. `counts` is scratch: empty or all 0
// before and after.
void apply_penalties(std::span<float> logits, const SamplingParams& params, std::span<const std::int32_t> prompt,
                     std::span<const std::int32_t> output, std::vector<std::int32_t>& counts);

// Whether any of the above changes something for a request with `num_output_tokens`.
bool needs_processing(const SamplingParams& params, std::size_t num_output_tokens);

// All of the above in order: allowed ids, bad words, min_tokens, logit bias, penalties.
void process_logits(std::span<float> logits, const SamplingParams& params, std::span<const std::int32_t> prompt,
                    std::span<const std::int32_t> output, std::vector<std::int32_t>& counts);

}  // namespace deltaic::ops

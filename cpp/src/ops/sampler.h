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
  TensorView logits;  // [vocab_size] f32, contiguous; changed in place
  const SamplingParams* params = nullptr;
  std::span<const std::int32_t> prompt_token_ids;
  std::span<const std::int32_t> output_token_ids;  // generated so far, the position before this one last
  std::uint64_t seed = 0;                          // of the request: given by the user, or drawn once for it
};

struct SampledToken {
  std::int32_t token_id = 0;
  bool is_finite = true;                  // false: a NaN or no finite logit; token_id is then 0
  std::optional<TokenLogprobs> logprobs;  // when params->logprobs is set
};

// Chooses one token a row, in the order of spec/sampling-and-serving.md C.4. Output position of a row =
// output_token_ids.size(). Random numbers are a pure function of (seed, output position, vocabulary index): what a row
// gives does not depend on the other rows.
std::vector<SampledToken> sample(const Context& ctx, std::span<const SamplerRow> rows);

// Raw log probabilities of `token_id` and the best `num_logprobs` (-1: all) of one row of logits.
TokenLogprobs token_logprobs(std::span<const float> logits, std::int32_t token_id, int num_logprobs);

}  // namespace deltaic::ops

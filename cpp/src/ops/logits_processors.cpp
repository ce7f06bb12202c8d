#include "cpp/src/ops/logits_processors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/src/check.h"

namespace deltaic::ops {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// The logit of `token_id`, which came from `field`.
float& logit_at(std::span<float> logits, std::int64_t token_id, const char* field) {
  DELTAIC_CHECK(token_id >= 0 && token_id < static_cast<std::int64_t>(logits.size()), field, " has token id ", token_id,
                ", outside the vocabulary [0, ", logits.size(), ")");
  return logits[static_cast<std::size_t>(token_id)];
}

// A finite logit stays finite, whatever a penalty makes of it.
float clamp_finite(float logit) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::clamp(logit, -kMax, kMax);
}

void apply_repetition_penalty(std::span<float> logits, float penalty, std::span<const std::int32_t> tokens,
                              const char* field, std::vector<std::int32_t>& seen) {
  for (const std::int32_t token : tokens) {
    float& logit = logit_at(logits, token, field);
    if (seen[static_cast<std::size_t>(token)]++ != 0 || logit == kMasked) continue;
    logit = clamp_finite(logit > 0 ? logit / penalty : logit * penalty);
  }
}

}  // namespace

void mask_all_but(std::span<float> logits, std::span<const int> allowed) {
  if (allowed.empty()) return;
  std::vector<float> kept;
  kept.reserve(allowed.size());
  for (const int id : allowed) kept.push_back(logit_at(logits, id, "allowed_token_ids"));
  std::fill(logits.begin(), logits.end(), kMasked);
  for (std::size_t i = 0; i < allowed.size(); ++i) logits[static_cast<std::size_t>(allowed[i])] = kept[i];
}

void mask_bad_words(std::span<float> logits, const std::vector<std::vector<int>>& bad_words,
                    std::span<const std::int32_t> output) {
  for (const std::vector<int>& word : bad_words) {
    DELTAIC_CHECK(!word.empty(), "bad_words has an empty word");
    float& logit = logit_at(logits, word.back(), "bad_words");
    const std::size_t prefix = word.size() - 1;
    if (prefix > output.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, output.end() - static_cast<std::ptrdiff_t>(prefix))) logit = kMasked;
  }
}

void mask_tokens(std::span<float> logits, std::span<const int> token_ids) {
  for (const int id : token_ids) logit_at(logits, id, "stop_token_ids") = kMasked;
}

void add_logit_bias(std::span<float> logits, const std::map<int, float>& bias) {
  for (const auto& [id, value] : bias) logit_at(logits, id, "logit_bias") += value;
}

void apply_penalties(std::span<float> logits, const SamplingParams& params, std::span<const std::int32_t> prompt,
                     std::span<const std::int32_t> output, std::vector<std::int32_t>& counts) {
  const bool repetition = params.repetition_penalty != 1.0F;
  const bool by_count = params.frequency_penalty != 0.0F || params.presence_penalty != 0.0F;
  if (!repetition && !by_count) return;
  counts.resize(logits.size());
  if (repetition) {
    apply_repetition_penalty(logits, params.repetition_penalty, prompt, "the prompt", counts);
    apply_repetition_penalty(logits, params.repetition_penalty, output, "the output", counts);
    for (const std::int32_t token : prompt) counts[static_cast<std::size_t>(token)] = 0;
    for (const std::int32_t token : output) counts[static_cast<std::size_t>(token)] = 0;
  }
  if (!by_count) return;
  for (const std::int32_t token : output) {
    logit_at(logits, token, "the output");
    ++counts[static_cast<std::size_t>(token)];
  }
  for (const std::int32_t token : output) {
    const auto id = static_cast<std::size_t>(token);
    if (counts[id] == 0) continue;
    if (logits[id] != kMasked) {
      logits[id] -= params.frequency_penalty * static_cast<float>(counts[id]);
      logits[id] = clamp_finite(logits[id] - params.presence_penalty);
    }
    counts[id] = 0;
  }
}

bool needs_processing(const SamplingParams& params, std::size_t num_output_tokens) {
  const bool masks_stops = num_output_tokens < static_cast<std::size_t>(std::max(params.min_tokens, 0));
  return !params.allowed_token_ids.empty() || !params.bad_words.empty() || masks_stops || !params.logit_bias.empty() ||
         params.repetition_penalty != 1.0F || params.frequency_penalty != 0.0F || params.presence_penalty != 0.0F;
}

void process_logits(std::span<float> logits, const SamplingParams& params, std::span<const std::int32_t> prompt,
                    std::span<const std::int32_t> output, std::vector<std::int32_t>& counts) {
  mask_all_but(logits, params.allowed_token_ids);
  mask_bad_words(logits, params.bad_words, output);
  if (output.size() < static_cast<std::size_t>(std::max(params.min_tokens, 0)))
    mask_tokens(logits, params.stop_token_ids);
  add_logit_bias(logits, params.logit_bias);
  apply_penalties(logits, params, prompt, output, counts);
}

}  // namespace deltaic::ops

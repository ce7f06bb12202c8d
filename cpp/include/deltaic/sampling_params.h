#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace deltaic {

// How a request's tokens are chosen: the part of the Python SamplingParams that the core needs. Text-level rules
// (stop strings, detokenisation) and finish rules (max_tokens, stop ids) stay with the engine.
struct SamplingParams {
  float temperature = 1.0F;                   // 0: greedy; else [0.01, 2]
  float top_p = 1.0F;                         // (0, 1]
  int top_k = 0;                              // outside (0, vocab): off
  float min_p = 0.0F;                         // [0, 1]
  float presence_penalty = 0.0F;              // [-2, 2]
  float frequency_penalty = 0.0F;             // [-2, 2]
  float repetition_penalty = 1.0F;            // > 0
  std::optional<std::int64_t> seed{};         // none: fresh entropy for each request
  std::optional<int> logprobs{};              // top logprobs a generated token; -1: the whole vocabulary
  std::optional<int> prompt_logprobs{};       // the same for prompt tokens
  std::map<int, float> logit_bias{};          // token id -> bias in [-100, 100]
  std::vector<int> allowed_token_ids{};       // empty: all
  std::vector<std::vector<int>> bad_words{};  // token sequences that must not be completed
  int min_tokens = 0;                         // stop ids are masked until so many output tokens exist
  std::vector<int> stop_token_ids{};          // end-of-sequence ids included; masked by min_tokens

  bool is_greedy() const { return temperature < 1e-5F; }
};

// Throws InvalidArgument naming the field and the numbers for a value that is NaN, infinite or out of range, or an
// id outside [0, vocab_size).
void validate(const SamplingParams& params, int vocab_size);

}  // namespace deltaic

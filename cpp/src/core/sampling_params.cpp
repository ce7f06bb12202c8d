#include <deltaic/sampling_params.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "cpp/src/check.h"

namespace deltaic {
namespace {

// The shortest text that reads back as the same float, so that a message never shows a value as if it were in range.
std::string text(float value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

// A NaN fails every comparison, so `in_range` is never true for it.
void check_range(std::string_view field, float value, bool in_range, std::string_view range) {
  DELTAIC_CHECK(in_range && std::isfinite(value), field, " is ", text(value), "; it must be ", range);
}

void check_ids(std::string_view field, const std::vector<int>& ids, int vocab_size) {
  for (const int id : ids)
    DELTAIC_CHECK(id >= 0 && id < vocab_size, field, " has token id ", id, ", outside the vocabulary [0, ", vocab_size,
                  ")");
}

void check_count(std::string_view field, const std::optional<int>& count, int vocab_size) {
  DELTAIC_CHECK(!count || (*count >= -1 && *count <= vocab_size), field, " is ", count.value_or(0),
                "; it must be -1 (the whole vocabulary) or in [0, ", vocab_size, "]");
}

// Throws where the masks that hold from the first token on leave nothing to choose. Longer bad words depend on what
// was generated and are not counted.
void check_some_token_is_left(const SamplingParams& params, int vocab_size) {
  const bool masks_stops = params.min_tokens > 0 && !params.stop_token_ids.empty();
  if (params.allowed_token_ids.empty() && params.bad_words.empty() && !masks_stops) return;
  const bool only_allowed = !params.allowed_token_ids.empty();
  std::vector<bool> left(static_cast<std::size_t>(vocab_size), !only_allowed);
  for (const int id : params.allowed_token_ids) left[static_cast<std::size_t>(id)] = true;
  for (const std::vector<int>& word : params.bad_words)
    if (word.size() == 1) left[static_cast<std::size_t>(word.front())] = false;
  if (masks_stops)
    for (const int id : params.stop_token_ids) left[static_cast<std::size_t>(id)] = false;
  DELTAIC_CHECK(std::find(left.begin(), left.end(), true) != left.end(), "no token can be chosen: allowed_token_ids (",
                only_allowed ? std::to_string(params.allowed_token_ids.size()) : "all", " of ", vocab_size,
                ") leaves none that bad_words or, with min_tokens ", params.min_tokens,
                ", stop_token_ids does not mask");
}

}  // namespace

void validate(const SamplingParams& params, int vocab_size) {
  DELTAIC_CHECK(vocab_size > 0, "vocab_size is ", vocab_size, "; it must be > 0");
  const auto within = [](float value, float low, float high) { return value >= low && value <= high; };
  check_range("temperature", params.temperature,
              within(params.temperature, 0.0F, 2.0F) && (params.is_greedy() || params.temperature >= 0.01F),
              "0 (greedy) or in [0.01, 2]");
  check_range("top_p", params.top_p, params.top_p > 0.0F && params.top_p <= 1.0F, "in (0, 1]");
  check_range("min_p", params.min_p, within(params.min_p, 0.0F, 1.0F), "in [0, 1]");
  check_range("presence_penalty", params.presence_penalty, within(params.presence_penalty, -2.0F, 2.0F), "in [-2, 2]");
  check_range("frequency_penalty", params.frequency_penalty, within(params.frequency_penalty, -2.0F, 2.0F),
              "in [-2, 2]");
  check_range("repetition_penalty", params.repetition_penalty, params.repetition_penalty > 0.0F, "> 0 and finite");
  check_count("logprobs", params.logprobs, vocab_size);
  check_count("prompt_logprobs", params.prompt_logprobs, vocab_size);
  DELTAIC_CHECK(params.min_tokens >= 0, "min_tokens is ", params.min_tokens, "; it must be >= 0");
  for (const auto& [id, bias] : params.logit_bias) {
    DELTAIC_CHECK(id >= 0 && id < vocab_size, "logit_bias has token id ", id, ", outside the vocabulary [0, ",
                  vocab_size, ")");
    check_range(detail::concat("logit_bias of token ", id), bias, within(bias, -100.0F, 100.0F), "in [-100, 100]");
  }
  check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size);
  check_ids("stop_token_ids", params.stop_token_ids, vocab_size);
  for (std::size_t i = 0; i < params.bad_words.size(); ++i) {
    DELTAIC_CHECK(!params.bad_words[i].empty(), "bad_words entry ", i, " of ", params.bad_words.size(),
                  " has no token");
    check_ids("bad_words", params.bad_words[i], vocab_size);
  }
  check_some_token_is_left(params, vocab_size);
}

}  // namespace deltaic

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <deltaic/sampling_params.h>

namespace deltaic::ops {

// What the device sampler knows of a request, beside its token counts: plain data that host and device share. Lists lie
// behind each other in one block of 4-byte words; *_at are offsets of words in it.
struct SlotRecord {
  float temperature;   // 0: greedy
  float top_p;         // 1: off
  std::int32_t top_k;  // 0: off
  bool has_min_p;
  double min_p_offset;  // temperature * ln(min_p): what min_p keeps is at least the largest logit plus this, rounded up
  float presence_penalty, frequency_penalty, repetition_penalty;
  std::int32_t min_tokens;
  std::uint64_t seed;
  std::int32_t num_logprobs;  // -1: none
  bool has_penalties;
  bool has_allowed;  // allowed_token_ids: a bit a word of the vocabulary at allowed_at
  std::int32_t allowed_at;
  std::int32_t num_bias, bias_ids_at, bias_values_at;
  std::int32_t num_stop_ids, stop_ids_at;
  // Word i has tokens [word_starts[i], word_starts[i + 1]) of those at word_tokens_at.
  std::int32_t num_bad_words, word_starts_at, word_tokens_at;
  // The newest output tokens, token j at j % history_size. history_size: the longest beginning of a bad word; 0: none.
  std::int32_t history_size, history_at;
};

struct PackedSlot {
  SlotRecord record{};
  std::vector<std::uint32_t> words{};  // the lists; floats by their bits
};

// The params must have passed validate(). Throws InvalidArgument for an id outside [0, vocab_size).
PackedSlot pack_slot(const SamplingParams& params, int vocab_size, std::span<const std::int32_t> output_token_ids,
                     std::uint64_t seed);

}  // namespace deltaic::ops

#pragma once

#include <cstdint>

#include "cpp/src/ops/sampler_slot.h"

namespace deltaic::cuda {

// A slot as kernels see it.
struct SamplerSlot {
  ops::SlotRecord record;
  std::uint32_t* words;    // the lists of the record
  std::uint32_t* counts;   // [vocab_size] with penalties: times in the output, and kInPrompt
  std::int32_t* seen;      // [vocab_size] with penalties: the ids with a count, in no order
  std::int32_t* num_seen;  // how many those are
  float* raw_logits;       // [vocab_size] with logprobs and something that changes logits
};
inline constexpr std::uint32_t kInPrompt = 1U << 31;

// What sample() says, for kernels.
struct SampleParams {
  float* logits;
  std::int64_t row_stride;
  std::int32_t vocab_size;
  const std::int32_t *slots, *output_positions;
  const SamplerSlot* table;
  std::int32_t* token_ids;
  std::uint8_t* is_finite;
  std::int32_t num_logprobs;
  std::int32_t* logprob_token_ids;
  float* logprobs;
  std::int32_t* ranks;
};

}  // namespace deltaic::cuda

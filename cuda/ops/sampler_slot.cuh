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
  float* raw_logits;       // [1 + max_context, vocab_size] with logprobs and something that changes logits
};
inline constexpr std::uint32_t kInPrompt = 1U << 31;

// What sample() says, for kernels.
struct SampleParams {
  float* logits;
  std::int64_t row_stride;
  std::int32_t vocab_size;
  const std::int32_t *slots, *output_positions;
  const std::int32_t *context_ids, *num_context;  // null: no row has any, and tokens are added to the slots
  std::int32_t max_context;
  const SamplerSlot* table;
  std::int32_t* token_ids;
  std::uint8_t* is_finite;
  std::int32_t num_logprobs;
  std::int32_t* logprob_token_ids;
  float* logprobs;
  std::int32_t* ranks;
};

// What add_tokens() says, for its kernel.
struct AddedTokensParams {
  const SamplerSlot* table;
  const std::int32_t *slots, *output_positions, *token_ids, *counts;
  std::int32_t num_rows, columns;
};

}  // namespace deltaic::cuda

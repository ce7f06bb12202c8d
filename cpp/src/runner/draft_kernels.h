#pragma once

#include <cstdint>

#include "cpp/src/ops/context.h"

// The kernels that keep what the host does not know of steps with drafts: how many of them were accepted, and so where
// each request stands. All pointers are on the device, and all kernels may be captured in a graph.

namespace deltaic::cuda {

// What is kept from step to step, by the slot of a request.
struct DraftSlots {
  std::int32_t* tokens = nullptr;        // [1 + max_drafts, num_slots]: the token sampled last; its drafts, -1: none
  std::int32_t* num_accepted = nullptr;  // [num_slots]: tokens of the last verified step that stand
  std::int32_t* num_rejected = nullptr;  // [num_slots]: drafts, since the request's first step
  std::int32_t num_slots = 0, max_drafts = 0;
};

// The rows of a step. The first num_verified have 1 + (drafts) tokens each, and sample a token at every one of them; of
// the others a row samples at its last token, or not at all.
struct DraftRows {
  std::int32_t num_rows = 0, num_verified = 0;
  const std::int32_t* slots = nullptr;            // [num_rows]; -1: padding
  const std::int32_t* query_start_loc = nullptr;  // [num_rows + 1]
  const std::int32_t* first_samples = nullptr;    // [num_rows]: where its rows of logits begin; -1: it samples nothing
  const std::int32_t* capacities = nullptr;       // [num_rows]: tokens that its blocks hold
  const std::int32_t* block_table = nullptr;      // [num_rows, row_stride]
  std::int64_t row_stride = 0;
  std::int32_t block_size = 0, max_model_len = 0;
};

// Puts the rows of a step where they really begin. The host plans as if all drafts in flight were accepted: a row
// stands as many tokens before that as drafts were rejected that the host has not heard of.
struct PlaceTokens {
  DraftSlots kept;
  DraftRows rows;
  const std::int32_t* num_rejected = nullptr;  // [num_rows]: that the host knows of; -1: the first step of the slot
  const std::int32_t* token_ids = nullptr;     // [num_tokens]: input ids, -1 for a draft that is not there
  std::int64_t* positions = nullptr;           // [num_tokens], as slot_mapping
  std::int64_t* slot_mapping = nullptr;
  std::int32_t* seq_lens = nullptr;          // [num_rows]
  std::int32_t* num_accepted = nullptr;      // [num_rows]; -1: the slot's
  std::int32_t* snapshot_offsets = nullptr;  // [num_rows]: tokens of the step in front of a snapshot's last
  std::int32_t* output_positions = nullptr;  // [num_samples]
  std::int32_t* context_ids = nullptr;       // [num_samples, max_drafts]: gets the drafts in front of each position
};
void place_tokens(ops::Stream stream, const PlaceTokens& args);

// What the host reads of a step, by row.
struct VerifiedRows {
  std::int32_t* token_ids = nullptr;  // [num_rows, 1 + max_drafts]
  std::int32_t* counts = nullptr;     // [num_rows]; 0: it samples nothing
  std::int32_t* is_finite = nullptr;  // [num_rows]; where 0, the count is 1
  std::int32_t* drafts = nullptr;     // [num_rows, max_drafts]: the next ones; -1: none
};

// The next pass of the draft module, one token a row; a row without a slot does nothing.
struct DraftPass {
  std::int32_t* slots = nullptr;             // [num_rows]; -1: the row gets no further draft
  std::int32_t* input_ids = nullptr;         // [num_rows]
  std::int32_t* hidden_rows = nullptr;       // [num_rows]: where the first pass leaves the row's newest hidden state
  std::int64_t* begin_positions = nullptr;   // [num_rows]: the position of that
  std::int64_t* positions = nullptr;         // [num_rows]
  std::int64_t* slot_mapping = nullptr;      // [num_rows]
  std::int32_t* seq_lens = nullptr;          // [num_rows]
  std::int32_t* output_positions = nullptr;  // [num_rows]: of the draft that is chosen next
  std::int32_t* num_context = nullptr;       // [num_rows]: drafts so far
  std::int32_t* context_ids = nullptr;       // [num_rows, max_drafts]: these
};

// Compares what was sampled with the drafts (ops::verify_drafts), and prepares the first pass of the draft module, over
// the tokens of the step: each with the token behind it.
struct VerifyTokens {
  DraftSlots kept;
  DraftRows rows;
  const std::int32_t* sampled_ids = nullptr;       // [num_samples]
  const std::uint8_t* is_finite = nullptr;         // [num_samples]
  const std::int32_t* token_ids = nullptr;         // [num_tokens], as PlaceTokens
  const std::int64_t* positions = nullptr;         // [num_tokens]
  const std::int32_t* output_positions = nullptr;  // [num_samples]
  const std::int32_t* next_ids = nullptr;          // [num_rows]: the token behind a row's last one; -1: what is sampled
  float acceptance = -1.0F;  // >= 0: a draft is accepted with this probability, whatever it is (RunnerOptions)
  bool makes_drafts = false;
  VerifiedRows result;
  std::int32_t* shifted_ids = nullptr;  // [num_tokens]
  DraftPass pass;  // gets all but what the first pass has of the step: input_ids, positions, slot_mapping, seq_lens
};
void verify_tokens(ops::Stream stream, const VerifyTokens& args);

// Takes the draft that each row got, the `number`-th from 0, and prepares the next pass.
struct TakeDraft {
  DraftSlots kept;
  DraftRows rows;
  const std::int32_t* sampled_ids = nullptr;  // [num_rows]
  const std::uint8_t* is_finite = nullptr;    // [num_rows]
  std::int32_t number = 0;
  bool is_last = false;
  VerifiedRows result;
  DraftPass pass;
};
void take_draft(ops::Stream stream, const TakeDraft& args);

// Copies 4-byte words, to pinned memory.
void copy_words(ops::Stream stream, const void* from, void* to, std::int64_t num_words);

}  // namespace deltaic::cuda

#pragma once

// What draft_kernels.h says, for one row or one token: host and device compile the same code, so that the rules are
// tested where there is no device.

#include "cpp/src/ops/random.h"
#include "cpp/src/runner/draft_kernels.h"

namespace deltaic::cuda {

DELTAIC_HOST_DEVICE inline int num_tokens_of(const DraftRows& rows, int row) {
  return rows.query_start_loc[row + 1] - rows.query_start_loc[row];
}

// Where the K and V of a position go; -1 past the row's blocks.
DELTAIC_HOST_DEVICE inline std::int64_t slot_of(const DraftRows& rows, int row, std::int64_t position) {
  if (position >= rows.capacities[row]) return -1;
  const std::int32_t block = rows.block_table[row * rows.row_stride + position / rows.block_size];
  return std::int64_t{block} * rows.block_size + position % rows.block_size;
}

// By how many tokens a row stands before what the host says.
DELTAIC_HOST_DEVICE inline int shift_of(const PlaceTokens& args, int row) {
  const int known = args.num_rejected[row], slot = args.rows.slots[row];
  return row < args.rows.num_verified && slot >= 0 && known >= 0 ? args.kept.num_rejected[slot] - known : 0;
}

// Token j of a verified row.
DELTAIC_HOST_DEVICE inline void place_token(const PlaceTokens& args, int row, int j, int shift) {
  const int first = args.rows.query_start_loc[row], token = first + j, sample = args.rows.first_samples[row] + j;
  const std::int64_t position = args.positions[token] - shift;
  args.positions[token] = position;
  args.slot_mapping[token] = slot_of(args.rows, row, position);
  args.output_positions[sample] -= shift;
  for (int i = 0; i < j; ++i)
    args.context_ids[std::int64_t{sample} * args.kept.max_drafts + i] = args.token_ids[first + 1 + i];
}

// Once for each row with a slot, after shift_of() was called for its tokens.
DELTAIC_HOST_DEVICE inline void place_row(const PlaceTokens& args, int row, int shift) {
  const int slot = args.rows.slots[row];
  if (args.num_rejected[row] < 0) args.kept.num_rejected[slot] = 0;
  args.seq_lens[row] -= shift;
  args.snapshot_offsets[row] += shift;
  if (args.num_accepted[row] < 0) args.num_accepted[row] = args.kept.num_accepted[slot];
}

// A draft of a script: accepted whatever it is.
DELTAIC_HOST_DEVICE inline bool is_accepted_by_script(float acceptance, int slot, int output_position) {
  constexpr std::uint64_t kSeed = 0x5EED;
  const std::uint32_t bits =
      ops::random_bits(kSeed, static_cast<std::uint32_t>(output_position), static_cast<std::uint32_t>(slot));
  return static_cast<float>(bits >> 8) < acceptance * 16777216.0F;
}

struct VerifiedRow {
  std::int32_t last_token = -1;  // what stands behind the row's last token that does; -1: nothing is sampled
  int last = 0;                  // which token of the row that is
};

// Once for each row.
DELTAIC_HOST_DEVICE inline VerifiedRow verify_row(const VerifyTokens& args, int row) {
  const DraftSlots& kept = args.kept;
  const DraftPass& pass = args.pass;
  const int slot = args.rows.slots[row], first_token = args.rows.query_start_loc[row];
  const int num_tokens = num_tokens_of(args.rows, row), first = slot < 0 ? -1 : args.rows.first_samples[row];
  for (int i = 0; i < kept.max_drafts; ++i) args.result.drafts[std::int64_t{row} * kept.max_drafts + i] = -1;
  VerifiedRow verified{.last_token = slot < 0 ? -1 : args.next_ids[row], .last = num_tokens - 1};
  int count = 0;
  bool is_finite = true;
  if (first >= 0) {
    std::int32_t* token_ids = args.result.token_ids + std::int64_t{row} * (1 + kept.max_drafts);
    const int num_drafts = row < args.rows.num_verified ? num_tokens - 1 : 0;
    for (bool is_right = true; is_right;) {
      if (args.is_finite[first + count] == 0) {
        is_finite = false;
        break;
      }
      const std::int32_t sampled = args.sampled_ids[first + count];
      token_ids[count] = sampled;
      const std::int32_t draft = count < num_drafts ? args.token_ids[first_token + 1 + count] : -1;
      is_right = draft >= 0 && (args.acceptance < 0.0F ? draft == sampled
                                                       : is_accepted_by_script(args.acceptance, slot,
                                                                               args.output_positions[first + count]));
      ++count;
    }
    if (!is_finite) token_ids[0] = 0, count = 1;
    verified.last_token = token_ids[count - 1];
    if (row < args.rows.num_verified) verified.last = count - 1;
    kept.tokens[slot] = verified.last_token;
    for (int i = 0; i < kept.max_drafts; ++i) kept.tokens[std::int64_t{1 + i} * kept.num_slots + slot] = -1;
    kept.num_accepted[slot] = count;
    kept.num_rejected[slot] += 1 + num_drafts - count;
    pass.output_positions[row] = args.output_positions[first] + count;
  }
  args.result.counts[row] = count;
  args.result.is_finite[row] = is_finite ? 1 : 0;
  pass.hidden_rows[row] = first_token + verified.last;
  pass.begin_positions[row] = args.positions[first_token + verified.last];
  pass.num_context[row] = 0;
  const bool drafts =
      args.makes_drafts && first >= 0 && is_finite && pass.begin_positions[row] + 2 < args.rows.max_model_len;
  pass.slots[row] = drafts ? slot : -1;
  return verified;
}

// The token behind token j of a row.
DELTAIC_HOST_DEVICE inline std::int32_t shifted_id(const VerifyTokens& args, int row, int j,
                                                   const VerifiedRow& verified) {
  if (j == verified.last) return verified.last_token < 0 ? 0 : verified.last_token;
  const int first = args.rows.query_start_loc[row];
  const std::int32_t next = j + 1 < num_tokens_of(args.rows, row) ? args.token_ids[first + j + 1] : 0;
  return next < 0 ? 0 : next;
}

// Once for each row.
DELTAIC_HOST_DEVICE inline void take_draft_of_row(const TakeDraft& args, int row) {
  const DraftPass& pass = args.pass;
  const int slot = pass.slots[row], max_drafts = args.kept.max_drafts;
  const std::int64_t position = pass.begin_positions[row] + args.number + 1;  // of the draft
  bool goes_on = false;
  if (slot >= 0 && args.is_finite[row] != 0) {
    const std::int32_t draft = args.sampled_ids[row];
    args.result.drafts[std::int64_t{row} * max_drafts + args.number] = draft;
    args.kept.tokens[std::int64_t{1 + args.number} * args.kept.num_slots + slot] = draft;
    pass.context_ids[std::int64_t{row} * max_drafts + args.number] = draft;
    pass.num_context[row] = args.number + 1;
    pass.output_positions[row] += 1;
    goes_on = !args.is_last && position + 2 < args.rows.max_model_len && position < args.rows.capacities[row];
    pass.input_ids[row] = draft;
  }
  if (goes_on) {
    pass.positions[row] = position;
    pass.slot_mapping[row] = slot_of(args.rows, row, position);
    pass.seq_lens[row] = static_cast<std::int32_t>(position) + 1;
    return;
  }
  pass.slots[row] = -1;
  pass.input_ids[row] = 0;
  pass.positions[row] = 0;
  pass.slot_mapping[row] = -1;
  pass.seq_lens[row] = 1;
}

}  // namespace deltaic::cuda

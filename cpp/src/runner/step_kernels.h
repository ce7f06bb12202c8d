#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpp/src/ops/context.h"

// The two kernels that stand between host and device in a step. Both read and write pinned host memory themselves:
// a few kilobytes, for which a copy would cost more than it moves.

namespace deltaic::cuda {

// A step on its way to the device. The fields that are const are in pinned memory, the others on the device.
struct StepUpload {
  // Copied as they are: num_bytes, a multiple of 16, from and to addresses that are.
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::int64_t num_bytes = 0;

  // token_ids[i] = source_ids[i], or kept_tokens[~source_ids[i]] where that is negative, or -1 where it is kNoToken.
  // input_ids[i] is the same, but 0 for -1.
  static constexpr std::int32_t kNoToken = std::numeric_limits<std::int32_t>::min();
  const std::int32_t* source_ids = nullptr;  // [num_tokens]
  std::int32_t* input_ids = nullptr;
  std::int32_t* token_ids = nullptr;    // may be null
  std::int32_t* kept_tokens = nullptr;  // [columns, num_slots]
  std::int32_t num_tokens = 0;

  // A request keeps its blocks in the row of slot_tables that is its slot. Row i of the step gives it the new_blocks
  // [new_begin[i], new_begin[i + 1]) behind the num_known[i] that it has, and takes all of them into row i of
  // block_table. Nothing is done for a slot of -1.
  const std::int32_t* row_slots = nullptr;  // [num_rows]
  const std::int32_t* num_known = nullptr;  // [num_rows]
  const std::int32_t* new_begin = nullptr;  // [num_rows + 1]
  const std::int32_t* new_blocks = nullptr;
  std::int32_t* slot_tables = nullptr;  // [num_slots, row_stride]
  std::int32_t* block_table = nullptr;  // [>= num_rows, row_stride]
  std::int64_t row_stride = 0;
  std::int32_t num_rows = 0;
};
void upload_step(ops::Stream stream, const StepUpload& step);

// Sampled tokens on their way to the host, and to the next step: last_sampled[slots[i]] = token_ids[i].
struct TokenCommit {
  const std::int32_t* token_ids = nullptr;  // [num_rows], as the other two
  const std::uint8_t* is_finite = nullptr;
  const std::int32_t* slots = nullptr;
  std::int32_t num_rows = 0;
  std::int32_t* last_sampled = nullptr;    // [num_slots]
  std::int32_t* host_token_ids = nullptr;  // [num_rows], pinned
  std::uint8_t* host_is_finite = nullptr;  // [num_rows], pinned
};
void commit_tokens(ops::Stream stream, const TokenCommit& tokens);

}  // namespace deltaic::cuda

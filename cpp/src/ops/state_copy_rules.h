// Which states a request copies and where their bytes lie: the one place that decides, for both backends.
#pragma once

#include "cpp/src/ops/state_copy.h"

#ifdef __CUDACC__
#define DELTAIC_HOST_DEVICE __host__ __device__
#else
#define DELTAIC_HOST_DEVICE
#endif

namespace deltaic::ops {

// The copies of one request: conv states from src_column shifted by `bias` tokens, temporal ones from
// src_column + bias, all into dst_column.
struct RequestCopy {
  std::int32_t row = 0, src_column = 0, dst_column = 0, bias = 0;
};

struct Decision {
  RequestCopy copy;
  bool has_copy = false;
  bool in_range = true;
  std::int32_t slot = -1;  // where the results go; -1: nowhere
  std::int32_t num_accepted = 0, state_idx = 0;
};

DELTAIC_HOST_DEVICE inline bool columns_exist(const StateCopyArgs& args, std::int64_t src, std::int64_t bias,
                                              std::int64_t dst) {
  return src >= 0 && bias >= 0 && src + bias < args.num_columns && dst >= 0 && dst < args.num_columns;
}

// R: tokens whose state is certain, all but the drafts. N: tokens after acceptance. A: N rounded down to a block.
DELTAIC_HOST_DEVICE inline void decide_postprocess(const StateCopyArgs& args, Decision& decision) {
  const std::int64_t accepted = decision.num_accepted, src = decision.state_idx;
  std::int64_t certain = 0;
  if (args.new_computed != nullptr) {
    certain = args.new_computed[decision.slot] - accepted + 1;
  } else {
    certain = std::int64_t{args.num_computed[decision.slot]} + args.num_scheduled[decision.slot];
    if (args.num_drafts != nullptr) certain -= args.num_drafts[decision.slot];
  }
  if (src < 0) return;  // no running state
  decision.in_range = accepted >= 1 && certain >= 0 && certain <= 0x7FFFFFFF;
  if (!decision.in_range) return;
  const auto num_blocks =
      static_cast<std::uint32_t>(certain + accepted - 1) / static_cast<std::uint32_t>(args.block_size);
  const std::int64_t aligned = std::int64_t{num_blocks} * args.block_size;
  if (aligned < certain || aligned == 0) return;
  const std::int64_t bias = aligned - certain, dst = std::int64_t{num_blocks} - 1;
  if (src != dst || bias != 0) {
    decision.in_range = columns_exist(args, src, bias, dst);
    if (!decision.in_range) return;
    decision.has_copy = true;
    decision.copy.src_column = static_cast<std::int32_t>(src);
    decision.copy.dst_column = static_cast<std::int32_t>(dst);
    decision.copy.bias = static_cast<std::int32_t>(bias);
  }
  // The running column now holds the state after its last whole block: the next step starts from offset 0.
  if (src == dst) decision.num_accepted = 1;
}

DELTAIC_HOST_DEVICE inline void decide_preprocess(const StateCopyArgs& args, Decision& decision) {
  const std::int64_t src = decision.state_idx;
  const std::int64_t num_tokens = std::int64_t{args.num_computed[decision.slot]} + args.num_scheduled[decision.slot];
  if (num_tokens <= 0) return;
  const std::int64_t dst = static_cast<std::uint32_t>(num_tokens - 1) / static_cast<std::uint32_t>(args.block_size);
  decision.state_idx = static_cast<std::int32_t>(dst);
  if (src < 0 || src == dst) return;
  const std::int64_t bias = decision.num_accepted > 1 ? decision.num_accepted - 1 : 0;
  decision.num_accepted = 1;
  decision.in_range = columns_exist(args, src, bias, dst);
  decision.has_copy = decision.in_range;
  decision.copy.src_column = static_cast<std::int32_t>(src);
  decision.copy.dst_column = static_cast<std::int32_t>(dst);
  decision.copy.bias = static_cast<std::int32_t>(bias);
}

DELTAIC_HOST_DEVICE inline Decision decide(const StateCopyArgs& args, std::int32_t row) {
  Decision decision;
  decision.copy.row = row;
  const std::int32_t slot = args.slot_ids == nullptr ? row : args.slot_ids[row];
  if (slot < 0 || slot >= args.num_slots) return decision;
  decision.slot = slot;
  decision.num_accepted = args.num_accepted[slot];
  decision.state_idx = args.state_idx[slot];
  if (args.state_idx_out == nullptr)
    decide_postprocess(args, decision);
  else
    decide_preprocess(args, decision);
  return decision;
}

// num_rows == 0: `size` bytes in one piece, which overlap themselves when `in_place`. Else num_rows rows of `size`
// bytes.
struct StateMove {
  const char* src = nullptr;
  char* dst = nullptr;
  std::int64_t size = 0;  // 0: nothing to do
  std::int64_t num_rows = 0, row_stride = 0;
  bool in_place = false;
};

DELTAIC_HOST_DEVICE inline StateMove locate(const StateTensor& state, const BlockTable& table,
                                            const RequestCopy& copy) {
  const std::int32_t* slots = table.data + copy.row * table.row_stride;
  const bool is_conv = state.conv_width > 0;
  const std::int64_t from = slots[is_conv ? copy.src_column : copy.src_column + copy.bias];
  const std::int64_t to = slots[copy.dst_column];
  StateMove move;
  if (from < 0 || from >= state.num_slots || to <= 0 || to >= state.num_slots) return move;
  char* base = reinterpret_cast<char*>(state.base);
  move.src = base + from * state.slot_stride;
  move.dst = base + to * state.slot_stride;
  if (!is_conv) {
    move.size = from == to ? 0 : state.state_bytes;
    return move;
  }
  const std::int64_t num_tokens = std::int64_t{state.conv_width} - copy.bias;
  if (num_tokens <= 0 || (from == to && copy.bias == 0)) return move;
  if (state.num_rows == 0) {
    move.src += copy.bias * state.row_bytes;
    move.size = num_tokens * state.row_bytes;
    move.in_place = from == to;
  } else if (copy.bias == 0 && state.row_stride == state.row_bytes) {
    move.size = state.state_bytes;
  } else {
    move.src += copy.bias * state.elem_size;
    move.size = num_tokens * state.elem_size;
    move.num_rows = state.num_rows;
    move.row_stride = state.row_stride;
  }
  return move;
}

}  // namespace deltaic::ops

#include "cpp/src/ops/state_copy.h"

#include <algorithm>
#include <limits>

#include "cpp/src/check.h"

namespace deltaic::ops {

namespace {

// What both kinds of state have in common; `first` is the first dimension that must have no gaps.
StateTensor describe(const TensorView& state, int first, int group, const char* what) {
  DELTAIC_CHECK(state.rank > first, "a ", what, " state has rank ", state.rank, ", must have more than ", first);
  DELTAIC_CHECK(group >= 0, "group ", group, " of a ", what, " state");
  const auto elem_size = static_cast<std::int64_t>(size_of(state.dtype));
  StateTensor result;
  result.base = reinterpret_cast<std::uint64_t>(state.data);
  result.elem_size = static_cast<std::int32_t>(elem_size);
  result.group = group;
  result.num_slots = state.shape[0];
  result.slot_stride = state.stride[0] * elem_size;
  std::int64_t expected = 1;
  for (int d = state.rank - 1; d >= first; --d) {
    DELTAIC_CHECK(state.shape[d] <= 1 || state.stride[d] == expected, "a ", what, " state has stride ", state.stride[d],
                  " in dimension ", d, ", must be ", expected);
    expected *= state.shape[d];
  }
  result.state_bytes = elem_size;
  for (int d = 1; d < state.rank; ++d) result.state_bytes *= state.shape[d];
  return result;
}

void check_slots_apart(const StateTensor& state, std::int64_t extent, const char* what) {
  DELTAIC_CHECK(state.num_slots <= 1 || state.slot_stride >= extent, "the slots of a ", what, " state are ",
                state.slot_stride, " bytes apart, each has ", extent);
}

void check_vector(const TensorView& x, const char* what, std::int64_t size, Device device) {
  DELTAIC_CHECK(x.rank == 1 && x.is_contiguous() && x.dtype == DType::i32, what,
                " must be a contiguous vector of i32, is of ", name(x.dtype), " with rank ", x.rank);
  DELTAIC_CHECK(x.shape[0] >= size, what, " has ", x.shape[0], " entries, needs ", size);
  DELTAIC_CHECK(x.device == device, what, " is not on the device of the states");
}

// Checks `inputs` and turns them into raw pointers.
StateCopyArgs resolve(const Context& ctx, const StateCopyPlan& plan, int num_reqs, const StateCopyInputs& inputs,
                      TensorView num_accepted_out, std::optional<TensorView> state_idx_out) {
  DELTAIC_CHECK(ctx.device == plan.device(), "the context is not on the device of the states");
  DELTAIC_CHECK(num_reqs >= 0 && num_reqs <= plan.num_rows(), "num_reqs is ", num_reqs, ", the block tables have ",
                plan.num_rows(), " rows");
  const std::int64_t num_slots = inputs.slot_ids ? inputs.num_accepted_tokens.numel() : num_reqs;
  const auto vector = [&](const TensorView& x, const char* what, std::int64_t size) {
    check_vector(x, what, size, ctx.device);
    return static_cast<std::int32_t*>(x.data);
  };
  StateCopyArgs args;
  args.num_accepted = vector(inputs.num_accepted_tokens, "num_accepted_tokens", num_slots);
  args.state_idx = vector(inputs.state_idx, "state_idx", num_slots);
  if (inputs.slot_ids) args.slot_ids = vector(*inputs.slot_ids, "slot_ids", num_reqs);
  if (inputs.new_computed_tokens) {
    args.new_computed = vector(*inputs.new_computed_tokens, "new_computed_tokens", num_slots);
  } else {
    args.num_computed = vector(inputs.num_computed_tokens, "num_computed_tokens", num_slots);
    args.num_scheduled = vector(inputs.num_scheduled_tokens, "num_scheduled_tokens", num_slots);
    if (inputs.num_draft_tokens) args.num_drafts = vector(*inputs.num_draft_tokens, "num_draft_tokens", num_slots);
  }
  args.num_accepted_out = vector(num_accepted_out, "num_accepted_out", num_slots);
  if (state_idx_out) args.state_idx_out = vector(*state_idx_out, "state_idx_out", num_slots);
  for (const std::int32_t* out : {args.num_accepted_out, args.state_idx_out})
    DELTAIC_CHECK(out == nullptr || (out != args.num_accepted && out != args.state_idx),
                  "an output is also an input: the inputs must be a snapshot");
  args.num_reqs = num_reqs;
  args.num_slots = static_cast<std::int32_t>(num_slots);
  args.block_size = plan.block_size();
  args.num_columns = plan.num_columns();
  return args;
}

void run(const Context& ctx, const StateCopyPlan& plan, const StateCopyArgs& args) {
  if (args.num_reqs == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      DELTAIC_CHECK(ctx.threads != nullptr, "state copies on the CPU need a context with threads");
      return cpu::copy_states(*ctx.threads, plan, args);
    case DeviceType::cuda:
      return cuda::copy_states(ctx.stream, plan, args);
  }
}

}  // namespace

StateTensor conv_state(const TensorView& state, ConvLayout layout, int group) {
  DELTAIC_CHECK(state.rank == 3, "a conv state must have 3 dimensions, has ", state.rank);
  const bool ds = layout == ConvLayout::ds;
  StateTensor result = describe(state, ds ? 2 : 1, group, "conv");
  const std::int64_t width = state.shape[ds ? 2 : 1];
  DELTAIC_CHECK(width >= 1 && width <= std::numeric_limits<std::int32_t>::max(), "a conv state of ", width, " tokens");
  result.conv_width = static_cast<std::int32_t>(width);
  result.row_bytes = state.shape[2] * result.elem_size;
  if (ds) {
    result.num_rows = state.shape[1];
    result.row_stride = (state.shape[1] <= 1 ? width : state.stride[1]) * result.elem_size;
    DELTAIC_CHECK(result.row_stride >= result.row_bytes, "the channels of a conv state are ", result.row_stride,
                  " bytes apart, each has ", result.row_bytes);
    check_slots_apart(result, (result.num_rows - 1) * result.row_stride + result.row_bytes, "conv");
  } else {
    check_slots_apart(result, result.state_bytes, "conv");
  }
  return result;
}

StateTensor temporal_state(const TensorView& state, int group) {
  StateTensor result = describe(state, 1, group, "temporal");
  check_slots_apart(result, result.state_bytes, "temporal");
  return result;
}

StateCopyPlan::StateCopyPlan(std::vector<StateTensor> states, std::span<const TensorView> block_tables, int block_size,
                             Device device)
    : states_(std::move(states)), block_size_(block_size), device_(device) {
  DELTAIC_CHECK(!states_.empty(), "no states to copy");
  DELTAIC_CHECK(block_size >= 1, "a mamba block has ", block_size, " tokens");
  DELTAIC_CHECK(!block_tables.empty(), "no block tables");
  num_rows_ = num_columns_ = std::numeric_limits<std::int32_t>::max();
  for (const TensorView& table : block_tables) {
    DELTAIC_CHECK(table.rank == 2 && table.dtype == DType::i32 && (table.shape[1] <= 1 || table.stride[1] == 1),
                  "a block table must be a matrix of i32 with contiguous rows, is of ", name(table.dtype),
                  " with rank ", table.rank);
    DELTAIC_CHECK(table.device == device, "a block table is not on the device of the states");
    const auto num_rows = static_cast<std::int32_t>(table.shape[0]),
               num_columns = static_cast<std::int32_t>(table.shape[1]);
    block_tables_.push_back({static_cast<const std::int32_t*>(table.data), table.stride[0], num_rows, num_columns});
    num_rows_ = std::min(num_rows_, num_rows);
    num_columns_ = std::min(num_columns_, num_columns);
  }
  std::int64_t num_tiles = 0;
  for (const StateTensor& state : states_) {
    DELTAIC_CHECK(state.group < static_cast<std::int64_t>(block_tables.size()), "a state is of group ", state.group,
                  ", there are ", block_tables.size(), " block tables");
    num_tiles += (state.state_bytes + kStateTileBytes - 1) / kStateTileBytes;
    DELTAIC_CHECK(num_tiles <= std::numeric_limits<std::int32_t>::max(),
                  "the states of a request are too large: ", num_tiles, " tiles of ", kStateTileBytes, " bytes");
    tile_ends_.push_back(static_cast<std::int32_t>(num_tiles));
  }
  if (device.type == DeviceType::cuda) device_tables_ = cuda::upload_state_copy_tables(*this);
}

void postprocess_states(const Context& ctx, const StateCopyPlan& plan, int num_reqs, const StateCopyInputs& inputs,
                        TensorView num_accepted_out) {
  run(ctx, plan, resolve(ctx, plan, num_reqs, inputs, num_accepted_out, std::nullopt));
}

void preprocess_states(const Context& ctx, const StateCopyPlan& plan, int num_reqs, const StateCopyInputs& inputs,
                       TensorView num_accepted_out, TensorView state_idx_out) {
  DELTAIC_CHECK(!inputs.new_computed_tokens, "preprocess_states takes num_computed_tokens and num_scheduled_tokens");
  run(ctx, plan, resolve(ctx, plan, num_reqs, inputs, num_accepted_out, state_idx_out));
}

}  // namespace deltaic::ops

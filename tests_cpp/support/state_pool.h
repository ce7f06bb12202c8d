#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/state_copy.h"
#include "tests_cpp/support/device_bytes.h"

namespace deltaic::test {

// One state tensor of a StatePool. Offsets and strides are in bytes of the pool's memory.
struct PoolState {
  bool is_conv = true;
  ops::ConvLayout layout = ops::ConvLayout::sd;
  std::int64_t elem_size = 2;
  std::int64_t width = 0;      // conv: tokens
  std::int64_t dim = 0;        // conv: channels; temporal: elements
  std::int64_t row_pitch = 0;  // DS: elements from one channel to the next; 0: width
  int group = 0;
  std::int64_t offset = 0, slot_stride = 0;

  std::int64_t pitch() const { return row_pitch > 0 ? row_pitch : width; }
  std::int64_t num_bytes() const {
    if (!is_conv) return dim * elem_size;
    return layout == ops::ConvLayout::sd ? width * dim * elem_size : ((dim - 1) * pitch() + width) * elem_size;
  }
};

// The vectors of one step; entry i is row i, or the row whose slot id is i.
struct StepVectors {
  std::vector<std::int32_t> accepted{}, state_idx{}, computed{}, scheduled{}, drafts{}, new_computed{}, slot_ids{};
};

enum class StateOp : std::uint8_t { postprocess, postprocess_new_computed, preprocess };

// Memory with states in slots, and a block table a group. Runs state copies on any device, and by the rules read aloud:
// reference() is the slow and obvious one.
struct StatePool {
  int block_size = 16;
  std::int64_t num_slots = 0;
  std::vector<PoolState> states{};
  std::vector<std::vector<std::vector<std::int32_t>>> tables{};  // [group][row][column]
  std::int64_t table_stride = 0;                                 // elements; 0: the number of columns
  std::vector<std::uint8_t> memory{};

  struct Result {
    std::vector<std::uint8_t> memory;
    std::vector<std::int32_t> accepted, state_idx;
    bool operator==(const Result&) const = default;
  };

  // Places the states of a layer in one page a slot, `gap` bytes between pages, after `offset` bytes of memory.
  void add_layer(std::vector<PoolState> layer, std::int64_t offset = 0, std::int64_t gap = 0) {
    std::int64_t page = gap;
    for (const PoolState& state : layer) page += state.num_bytes();
    std::int64_t elem_size = 1;
    for (const PoolState& state : layer) elem_size = std::max(elem_size, state.elem_size);
    page = (page + elem_size - 1) / elem_size * elem_size;
    std::int64_t at = static_cast<std::int64_t>(memory.size()) + offset;
    for (PoolState& state : layer) {
      state.offset = at;
      state.slot_stride = page;
      at += state.num_bytes();
      states.push_back(state);
    }
    memory.resize(memory.size() + static_cast<std::size_t>(offset + page * num_slots), 0);
  }

  std::int64_t at(const PoolState& state, std::int64_t slot, std::int64_t token, std::int64_t channel) const {
    const std::int64_t element =
        state.layout == ops::ConvLayout::sd ? token * state.dim + channel : channel * state.pitch() + token;
    return state.offset + slot * state.slot_stride + element * state.elem_size;
  }

  Result reference(StateOp op, int num_reqs, const StepVectors& step) const {
    Result result{memory, step.accepted, step.state_idx};
    std::int64_t num_columns = 1 << 30;
    for (const auto& table : tables) num_columns = std::min<std::int64_t>(num_columns, std::ssize(table[0]));
    for (int row = 0; row < num_reqs; ++row) {
      const int i = step.slot_ids.empty() ? row : step.slot_ids[row];
      if (i < 0) continue;
      const std::int64_t a = step.accepted[i], s = step.state_idx[i];
      std::int64_t b = 0, d = 0;
      if (op == StateOp::preprocess) {
        d = (std::int64_t{step.computed[i]} + step.scheduled[i] + block_size - 1) / block_size - 1;
        b = std::max<std::int64_t>(a - 1, 0);
        result.state_idx[i] = static_cast<std::int32_t>(d);
        if (s < 0 || s == d) continue;
        result.accepted[i] = 1;
      } else {
        const std::int64_t certain = op == StateOp::postprocess
                                         ? std::int64_t{step.computed[i]} + step.scheduled[i] - step.drafts[i]
                                         : step.new_computed[i] - a + 1;
        const std::int64_t aligned = (certain + a - 1) / block_size * block_size;
        if (a < 1 || s < 0 || aligned < certain || aligned == 0) continue;
        b = aligned - certain, d = aligned / block_size - 1;
        if (s == d && b == 0) result.accepted[i] = 1;
      }
      if ((s == d && b == 0) || s + b >= num_columns || d >= num_columns) continue;
      if (s == d) result.accepted[i] = 1;
      for (const PoolState& state : states) copy_one(state, tables[state.group][row], s, d, b, result.memory);
    }
    return result;
  }

  void copy_one(const PoolState& state, const std::vector<std::int32_t>& slots, std::int64_t s, std::int64_t d,
                std::int64_t b, std::vector<std::uint8_t>& bytes) const {
    const std::int64_t from = slots[s + (state.is_conv ? 0 : b)], to = slots[d];
    if (from < 0 || to <= 0) return;
    if (!state.is_conv)
      std::memmove(&bytes[state.offset + to * state.slot_stride], &bytes[state.offset + from * state.slot_stride],
                   state.num_bytes());
    else
      for (std::int64_t token = 0; token < state.width - b; ++token)
        for (std::int64_t channel = 0; channel < state.dim; ++channel)
          std::memmove(&bytes[at(state, to, token, channel)], &bytes[at(state, from, token + b, channel)],
                       state.elem_size);
  }

  Result run(StateOp op, int num_reqs, const StepVectors& step, Device device) const {
    const DeviceVector<std::uint8_t> bytes(memory, device);
    std::vector<DeviceVector<std::int32_t>> device_tables;
    std::vector<TensorView> table_views;
    for (const auto& table : tables) {
      const std::int64_t num_columns = std::ssize(table[0]);
      const std::int64_t stride = std::max(table_stride, num_columns);
      std::vector<std::int32_t> flat(table.size() * stride, 1 << 20);  // what lies between the rows is not a slot
      for (std::size_t row = 0; row < table.size(); ++row)
        std::copy(table[row].begin(), table[row].end(), flat.begin() + static_cast<std::ptrdiff_t>(row * stride));
      device_tables.emplace_back(flat, device);
      TensorView view = make_view(device_tables.back().data(), DType::i32, {std::ssize(table), num_columns}, device);
      view.stride[0] = stride;
      table_views.push_back(view);
    }
    std::vector<ops::StateTensor> tensors;
    for (const PoolState& state : states) tensors.push_back(describe(state, bytes.data(), device));
    const ops::StateCopyPlan plan(tensors, table_views, block_size, device);

    const auto vector = [&](const std::vector<std::int32_t>& x) { return DeviceVector<std::int32_t>(x, device); };
    const auto accepted = vector(step.accepted), state_idx = vector(step.state_idx), computed = vector(step.computed),
               scheduled = vector(step.scheduled), drafts = vector(step.drafts), slot_ids = vector(step.slot_ids),
               new_computed = vector(step.new_computed), accepted_out = vector(step.accepted),
               state_idx_out = vector(step.state_idx);
    ops::StateCopyInputs inputs{.num_accepted_tokens = accepted.view(DType::i32),
                                .state_idx = state_idx.view(DType::i32),
                                .num_computed_tokens = computed.view(DType::i32),
                                .num_scheduled_tokens = scheduled.view(DType::i32)};
    if (!step.slot_ids.empty()) inputs.slot_ids = slot_ids.view(DType::i32);
    if (op == StateOp::postprocess) inputs.num_draft_tokens = drafts.view(DType::i32);
    if (op == StateOp::postprocess_new_computed) inputs.new_computed_tokens = new_computed.view(DType::i32);
    ThreadPool threads(2);
    const ops::Context ctx{.device = device, .threads = &threads};
    if (op == StateOp::preprocess)
      ops::preprocess_states(ctx, plan, num_reqs, inputs, accepted_out.view(DType::i32),
                             state_idx_out.view(DType::i32));
    else
      ops::postprocess_states(ctx, plan, num_reqs, inputs, accepted_out.view(DType::i32));
    return {bytes.host(), accepted_out.host(), state_idx_out.host()};
  }

  // The tensor that a caller would pass, of any dtype of the right size.
  ops::StateTensor describe(const PoolState& state, std::uint8_t* base, Device device) const {
    const DType dtype = state.elem_size == 1   ? DType::u8
                        : state.elem_size == 2 ? DType::bf16
                        : state.elem_size == 4 ? DType::f32
                                               : DType::f64;
    const bool ds = state.layout == ops::ConvLayout::ds;
    TensorView view = state.is_conv
                          ? make_view(base + state.offset, dtype,
                                      {num_slots, ds ? state.dim : state.width, ds ? state.width : state.dim}, device)
                          : make_view(base + state.offset, dtype, {num_slots, state.dim}, device);
    view.stride[0] = state.slot_stride / state.elem_size;
    if (state.is_conv && ds) view.stride[1] = state.pitch();
    return state.is_conv ? ops::conv_state(view, state.layout, state.group) : ops::temporal_state(view, state.group);
  }
};

}  // namespace deltaic::test

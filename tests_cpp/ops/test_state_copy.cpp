#include <map>
#include <random>
#include <string>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "tests_cpp/support/state_pool.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

PoolState conv(std::int64_t elem_size, std::int64_t width, std::int64_t dim, ops::ConvLayout layout, int group = 0) {
  return {.is_conv = true, .layout = layout, .elem_size = elem_size, .width = width, .dim = dim, .group = group};
}
PoolState temporal(std::int64_t elem_size, std::int64_t dim, int group = 0) {
  return {.is_conv = false, .elem_size = elem_size, .dim = dim, .group = group};
}

// Rows of num_columns slots, 1, 2, 3, ...
std::vector<std::vector<std::int32_t>> fresh_table(int num_rows, int num_columns) {
  std::vector<std::vector<std::int32_t>> table(num_rows, std::vector<std::int32_t>(num_columns));
  std::int32_t next = 1;
  for (auto& row : table)
    for (auto& slot : row) slot = next++;
  return table;
}

void check_against_reference(const StatePool& pool, StateOp op, int num_reqs, const StepVectors& step) {
  const auto expected = pool.reference(op, num_reqs, step);
  for (const Device device : devices()) {
    CAPTURE(static_cast<int>(device.type));
    const auto result = pool.run(op, num_reqs, step, device);
    CHECK(result.accepted == expected.accepted);
    CHECK(result.state_idx == expected.state_idx);
    CHECK(result.memory == expected.memory);
  }
}

struct Vector {
  int computed, scheduled, drafts, accepted, state_idx;
  int copy_bias, copy_column;  // -1: no copy
  int accepted_out;
  std::vector<std::int32_t> slots{};  // of the row; empty: slots of its own
};

// 1 row a vector, all at once, over a GDN layer of each layout and element size.
void check_vectors(const std::vector<Vector>& vectors) {
  constexpr int kColumns = 8;
  const int num_reqs = static_cast<int>(vectors.size());
  StatePool pool;
  pool.num_slots = num_reqs * kColumns + 64;
  pool.tables = {fresh_table(num_reqs, kColumns)};
  StepVectors step;
  for (int row = 0; row < num_reqs; ++row) {
    const Vector& v = vectors[row];
    for (std::size_t c = 0; c < v.slots.size(); ++c) pool.tables[0][row][c] = num_reqs * kColumns + v.slots[c];
    step.computed.push_back(v.computed), step.scheduled.push_back(v.scheduled), step.drafts.push_back(v.drafts);
    step.accepted.push_back(v.accepted), step.state_idx.push_back(v.state_idx);
    step.new_computed.push_back(v.computed + v.scheduled - v.drafts + v.accepted - 1);
  }
  for (const auto layout : {ops::ConvLayout::sd, ops::ConvLayout::ds})
    for (const std::int64_t elem_size : {1, 2, 4, 8})
      pool.add_layer({conv(elem_size, 6, 24, layout), temporal(elem_size, 40)});
  pool.memory = random_bytes(pool.memory.size(), 1);

  for (const auto op : {StateOp::postprocess, StateOp::postprocess_new_computed}) {
    check_against_reference(pool, op, num_reqs, step);
    for (const Device device : devices()) {
      const auto result = pool.run(op, num_reqs, step, device);
      for (int row = 0; row < num_reqs; ++row) {
        const Vector& v = vectors[row];
        CAPTURE(row);
        CAPTURE(v.computed);
        CAPTURE(v.scheduled);
        CAPTURE(v.accepted);
        CHECK(result.accepted[row] == v.accepted_out);
        // The table says where the state after the whole block came from: look at the temporal bytes.
        const PoolState& state = pool.states[1];
        const auto slot_bytes = [&](const std::vector<std::uint8_t>& memory, int column) {
          const auto begin = memory.begin() + state.offset + pool.tables[0][row][column] * state.slot_stride;
          return std::vector<std::uint8_t>(begin, begin + state.num_bytes());
        };
        for (int column = 0; column < kColumns; ++column) {
          const int source = column == v.copy_column ? v.state_idx + v.copy_bias : column;
          CHECK(slot_bytes(result.memory, column) == slot_bytes(pool.memory, source));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("postprocess gives the worked vectors") {
  check_vectors({
      {60, 5, 2, 3, 3, 1, 3, 1},
      {30, 3, 0, 2, 1, -1, -1, 2},
      {45, 8, 3, 4, 2, -1, -1, 4},
      {10, 6, 0, 2, 0, -1, -1, 1},
      {30, 3, 0, 1, 1, -1, -1, 1},
      {60, 5, 0, 3, 3, -1, -1, 3},
      {30, 2, 0, 5, 1, -1, -1, 1},
      {30, 1, 0, 2, 1, 1, 1, 1},
      {60, 3, 0, 3, 2, 1, 3, 3},
      {30, 2, 0, 3, 0, 0, 1, 3, {5, 5}},
      {48, 0, 0, 1, 2, -1, -1, 1},
      {31, 1, 0, 3, 0, 0, 1, 3, {41, 7}},
      {28, 2, 0, 3, 1, 2, 1, 1},
  });
}

TEST_CASE("postprocess saves what was accepted up to the boundary, for every bias") {
  std::vector<Vector> vectors;
  for (const int boundary : {32, 64})
    for (const int bias : {1, 2, 3})
      for (const bool same : {true, false}) {
        const int column = boundary / 16 - 1;
        vectors.push_back(
            {boundary - 2 * bias, bias, 0, bias + 1, same ? column : column - 1, bias, column, same ? 1 : bias + 1});
      }
  check_vectors(vectors);
}

TEST_CASE("the conv window shifts in place for every element size and layout (D01, D09)") {
  for (const auto layout : {ops::ConvLayout::sd, ops::ConvLayout::ds})
    for (const std::int64_t elem_size : {1, 2, 4, 8})
      for (const std::int64_t dim : {1, 7, 64, 1000, 8192})
        for (const int bias : {1, 2, 3}) {
          CAPTURE(static_cast<int>(layout));
          CAPTURE(elem_size);
          CAPTURE(dim);
          CAPTURE(bias);
          StatePool pool{.num_slots = 6};
          pool.tables = {{{1, 2, 3, 4, 5}}};
          pool.add_layer({conv(elem_size, 4, dim, layout)}, dim % 3 * elem_size);
          pool.memory = random_bytes(pool.memory.size(), 2);
          // 32 tokens are exactly two blocks: column 1 is both running and saved.
          const StepVectors step{
              .accepted = {bias + 1}, .state_idx = {1}, .computed = {31 - bias}, .scheduled = {1}, .drafts = {0}};
          check_against_reference(pool, StateOp::postprocess, 1, step);
        }
}

TEST_CASE("all states of a request use one snapshot of its accepted count (D02)") {
  StatePool pool{.num_slots = 9};
  pool.tables = {{{1, 2, 3, 4, 5, 6}}};
  for (int layer = 0; layer < 48; ++layer) pool.add_layer({conv(2, 6, 32, ops::ConvLayout::sd), temporal(4, 96)});
  pool.memory = random_bytes(pool.memory.size(), 3);
  const StepVectors step{.accepted = {3}, .state_idx = {1}, .computed = {28}, .scheduled = {2}, .drafts = {0}};
  const auto expected = pool.reference(StateOp::postprocess, 1, step);
  CHECK(expected.accepted[0] == 1);
  for (const Device device : devices())
    for (int repeat = 0; repeat < (device.type == DeviceType::cuda ? 1000 : 20); ++repeat)
      REQUIRE(pool.run(StateOp::postprocess, 1, step, device) == expected);
}

TEST_CASE("a physical self-copy of two columns changes no state and keeps the count (D03)") {
  StatePool pool{.num_slots = 16};
  pool.tables = {{{7, 7, 10, 11}}};
  pool.add_layer({conv(2, 4, 16, ops::ConvLayout::sd), temporal(2, 32)});
  pool.memory = random_bytes(pool.memory.size(), 4);
  const StepVectors step{.accepted = {3}, .state_idx = {0}, .computed = {30}, .scheduled = {2}, .drafts = {0}};
  for (const Device device : devices()) {
    const auto result = pool.run(StateOp::postprocess, 1, step, device);
    CHECK(result.memory == pool.memory);
    CHECK(result.accepted[0] == 3);
  }
}

TEST_CASE("a copy moves the state and nothing else of its page (D04)") {
  StatePool pool{.num_slots = 6};
  pool.tables = {{{4, 3}}};
  pool.add_layer({conv(2, 4, 64, ops::ConvLayout::sd), temporal(2, 128)});
  pool.states.erase(pool.states.begin());  // the temporal state alone: 256 of the page's 768 bytes
  pool.memory = random_bytes(pool.memory.size(), 5);
  const StepVectors step{.accepted = {3}, .state_idx = {0}, .computed = {30}, .scheduled = {2}, .drafts = {0}};
  for (const Device device : devices()) {
    const auto result = pool.run(StateOp::postprocess, 1, step, device);
    std::size_t num_changed = 0;
    for (std::size_t i = 0; i < pool.memory.size(); ++i) num_changed += result.memory[i] != pool.memory[i];
    CHECK(num_changed > 200);
    CHECK(num_changed <= 256);
    CHECK(result.memory == pool.reference(StateOp::postprocess, 1, step).memory);
  }
}

TEST_CASE("a wide block table gives what a tight one gives (D05)") {
  StatePool pool{.num_slots = 33};
  pool.tables = {fresh_table(4, 8)};
  pool.add_layer({conv(2, 6, 16, ops::ConvLayout::sd), temporal(4, 32)});
  pool.memory = random_bytes(pool.memory.size(), 6);
  const StepVectors step{.accepted = {3, 2, 3, 2},
                         .state_idx = {3, 1, 1, 1},
                         .computed = {60, 30, 28, 30},
                         .scheduled = {5, 1, 2, 3},
                         .drafts = {2, 0, 0, 0}};
  const auto expected = pool.reference(StateOp::postprocess, 4, step);
  for (const std::int64_t stride : {8, 9, 512}) {
    pool.table_stride = stride;
    for (const Device device : devices()) CHECK(pool.run(StateOp::postprocess, 4, step, device) == expected);
  }
}

TEST_CASE("addresses keep all their 64 bits (D06)") {
  for (const std::uint64_t address : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 63) - 1,
                                      std::uint64_t{1} << 63, (std::uint64_t{1} << 63) + 1234, ~std::uint64_t{0}}) {
    const TensorView view = make_view(reinterpret_cast<void*>(address), DType::u8, {4, 16});
    CHECK(ops::temporal_state(view, 0).base == address);
  }
}

TEST_CASE("slot ids times strides pass 2^31 (D07)") {
  // 4 MiB pages: slot 1000 lies 4.2 GB into the pool, which is claimed but hardly touched.
  constexpr std::int64_t kPage = std::int64_t{4} << 20, kSlots = 1002, kElements = 5000;
  for (const Device device : devices()) {
    CAPTURE(static_cast<int>(device.type));
    const Buffer pool(static_cast<std::size_t>(kPage * kSlots), device);
    const auto source = random_bytes(kElements * 4, 7);
    const auto slot = [&](std::int64_t id) { return static_cast<std::uint8_t*>(pool.data()) + id * kPage; };
    const auto transfer = [&](void* dst, const void* src) {
      if (device.type == DeviceType::cuda)
        cuda::copy_and_wait(dst, src, source.size());
      else
        std::memcpy(dst, src, source.size());
    };
    transfer(slot(1000), source.data());
    TensorView state = make_view(pool.data(), DType::f32, {kSlots, kElements}, device);
    state.stride[0] = kPage / 4;
    const DeviceVector<std::int32_t> table({1000, 1001}, device), accepted({3}, device), state_idx({0}, device),
        computed({30}, device), scheduled({2}, device), out({0}, device);
    const TensorView table_view = make_view(table.data(), DType::i32, {1, 2}, device);
    const ops::StateCopyPlan plan({ops::temporal_state(state, 0)}, std::span(&table_view, 1), 16, device);
    ThreadPool threads(1);
    ops::postprocess_states({.device = device, .threads = &threads}, plan, 1,
                            {.num_accepted_tokens = accepted.view(DType::i32),
                             .state_idx = state_idx.view(DType::i32),
                             .num_computed_tokens = computed.view(DType::i32),
                             .num_scheduled_tokens = scheduled.view(DType::i32)},
                            out.view(DType::i32));
    std::vector<std::uint8_t> copied(source.size());
    transfer(copied.data(), slot(1001));
    CHECK(copied == source);
    CHECK(out.host()[0] == 3);
  }
}

TEST_CASE("states at any offset are copied byte for byte (D08)") {
  for (std::int64_t offset = 0; offset < 16; ++offset)
    for (const std::int64_t dim : {1, 5, 40, 16 * 1024 + 3, 100 * 1000 + 7})
      for (const auto layout : {ops::ConvLayout::sd, ops::ConvLayout::ds}) {
        CAPTURE(offset);
        CAPTURE(dim);
        StatePool pool{.num_slots = 6};
        pool.tables = {{{1, 2, 3, 4, 5}}};
        pool.add_layer({conv(1, 4, dim / 8 + 1, layout), temporal(1, dim)}, offset, offset % 3);
        pool.memory = random_bytes(pool.memory.size(), 8);
        const StepVectors step{.accepted = {3}, .state_idx = {0}, .computed = {30}, .scheduled = {1}, .drafts = {0}};
        check_against_reference(pool, StateOp::postprocess, 1, step);  // bias 1, columns 0 -> 1
      }
}

TEST_CASE("garbage counts and columns are skipped, and the other rows served (D10)") {
  constexpr int kSpeculative = 2;
  const std::vector<std::int32_t> garbage{0, -1, kSpeculative + 2, 1 << 30, -(1 << 30), 2147483647, -2147483647 - 1};
  for (const std::int32_t accepted : garbage)
    for (const std::int32_t state_idx : {1, 7, -1, -7, 1 << 30}) {
      CAPTURE(accepted);
      CAPTURE(state_idx);
      StatePool pool{.num_slots = 17};
      pool.tables = {fresh_table(2, 8)};
      pool.add_layer(
          {conv(2, 3 + kSpeculative, 16, ops::ConvLayout::sd), conv(2, 5, 16, ops::ConvLayout::ds), temporal(4, 32)});
      pool.memory = random_bytes(pool.memory.size(), 9);
      const StepVectors step{.accepted = {accepted, 3},
                             .state_idx = {state_idx, 1},
                             .computed = {30, 28},
                             .scheduled = {3, 2},
                             .drafts = {2, 0}};
      const auto expected = pool.reference(StateOp::postprocess, 2, step);
      CHECK(expected.accepted[1] == 1);
      for (const Device device : devices()) {
#ifndef NDEBUG
        if (device.type == DeviceType::cpu) continue;  // the next case
#endif
        CHECK(pool.run(StateOp::postprocess, 2, step, device) == expected);
      }
    }
}

TEST_CASE("a build with debug checks refuses garbage counts on the CPU (D10)") {
#ifndef NDEBUG
  StatePool pool{.num_slots = 9};
  pool.tables = {fresh_table(1, 8)};
  pool.add_layer({temporal(4, 32)});
  const StepVectors step{.accepted = {1 << 30}, .state_idx = {1}, .computed = {30}, .scheduled = {3}, .drafts = {2}};
  CHECK_THROWS_WITH_AS(pool.run(StateOp::postprocess, 1, step, Device{}),
                       "row 0 has 1073741824 accepted tokens and running column 1: its block table has 8 columns",
                       InvalidArgument);
#endif
}

TEST_CASE("all rows of the largest batch are served, and no more than were asked for (D14)") {
  constexpr int kRows = 1030;  // more than a block of threads decides at once
  StatePool pool{.num_slots = kRows * 3 + 1};
  pool.tables = {fresh_table(kRows, 3)};
  pool.add_layer({conv(2, 6, 8, ops::ConvLayout::sd), temporal(4, 16)});
  pool.memory = random_bytes(pool.memory.size(), 10);
  StepVectors step;
  for (int row = 0; row < kRows; ++row) {
    const int bias = row % 3;
    step.accepted.push_back(bias + 1), step.state_idx.push_back(0), step.computed.push_back(30 - bias);
    step.scheduled.push_back(2), step.drafts.push_back(0);
  }
  for (const int num_reqs : {0, 1, 255, 256, 257, 1029, 1030})
    check_against_reference(pool, StateOp::postprocess, num_reqs, step);
  CHECK_THROWS_WITH_AS(pool.run(StateOp::postprocess, kRows + 1, step, Device{}),
                       "num_reqs is 1031, the block tables have 1030 rows", InvalidArgument);
}

TEST_CASE("both conventions for no slot are inert, and slot 0 is never written (D64)") {
  StatePool pool{.num_slots = 9};
  pool.add_layer({conv(2, 6, 16, ops::ConvLayout::sd), conv(4, 6, 16, ops::ConvLayout::ds), temporal(4, 32)});
  pool.memory = random_bytes(pool.memory.size(), 11);
  const StepVectors step{.accepted = {3, 3, 3, 3},
                         .state_idx = {1, 0, -1, 0},
                         .computed = {28, 30, 30, 30},
                         .scheduled = {2, 2, 2, 2},
                         .drafts = {0, 0, 0, 0}};
  for (const std::int32_t none : {0, -1}) {
    CAPTURE(none);
    pool.tables = {{{none, none, none, none}, {1, none, 2, 3}, {none, none, none, none}, {4, 5, 6, 7}}};
    for (const auto op : {StateOp::postprocess, StateOp::preprocess}) check_against_reference(pool, op, 4, step);
    for (const Device device : devices()) {
      const auto result = pool.run(StateOp::postprocess, 4, step, device);
      for (const PoolState& state : pool.states)
        CHECK(std::equal(result.memory.begin() + state.offset, result.memory.begin() + state.offset + state.num_bytes(),
                         pool.memory.begin() + state.offset));
    }
  }
}

TEST_CASE("preprocess carries a state over a block boundary and leaves the others") {
  StatePool pool{.num_slots = 33};
  pool.tables = {fresh_table(5, 6)};
  pool.add_layer({conv(2, 6, 16, ops::ConvLayout::sd), conv(2, 6, 16, ops::ConvLayout::ds), temporal(4, 32)});
  pool.memory = random_bytes(pool.memory.size(), 12);
  // Computed 31 with 2 accepted crosses into column 2 with bias 1; the second row stays; the third is new; the fourth
  // comes from a prefix hit of 2 blocks; the fifth skips columns.
  const StepVectors step{.accepted = {2, 2, 1, 1, 3},
                         .state_idx = {1, 1, -1, 1, 0},
                         .computed = {31, 20, 0, 32, 15},
                         .scheduled = {3, 2, 40, 16, 60}};
  const auto expected = pool.reference(StateOp::preprocess, 5, step);
  CHECK(expected.accepted == std::vector<std::int32_t>{1, 2, 1, 1, 1});
  CHECK(expected.state_idx == std::vector<std::int32_t>{2, 1, 2, 2, 4});
  check_against_reference(pool, StateOp::preprocess, 5, step);
}

TEST_CASE("states, tables and vectors that do not fit are refused with the numbers") {
  std::vector<std::uint8_t> memory(4096);
  TensorView state = make_view(memory.data(), DType::f32, {4, 3, 8});
  CHECK_THROWS_WITH_AS(ops::conv_state(make_view(memory.data(), DType::f32, {4, 8}), ops::ConvLayout::sd, 0),
                       "a conv state must have 3 dimensions, has 2", InvalidArgument);
  state.stride = {12, 8, 1};
  CHECK_THROWS_WITH_AS(ops::conv_state(state, ops::ConvLayout::sd, 0),
                       "the slots of a conv state are 48 bytes apart, each has 96", InvalidArgument);
  state.stride = {32, 10, 1};
  CHECK_THROWS_WITH_AS(ops::conv_state(state, ops::ConvLayout::sd, 0),
                       "a conv state has stride 10 in dimension 1, must be 8", InvalidArgument);
  CHECK(ops::conv_state(state, ops::ConvLayout::ds, 0).row_stride == 40);
  const TensorView table = make_view(memory.data(), DType::i64, {4, 4});
  state = make_view(memory.data(), DType::f32, {4, 3, 8});
  CHECK_THROWS_WITH_AS(ops::StateCopyPlan({ops::temporal_state(state, 0)}, std::span(&table, 1), 16, Device{}),
                       "a block table must be a matrix of i32 with contiguous rows, is of i64 with rank 2",
                       InvalidArgument);
  const TensorView good = make_view(memory.data(), DType::i32, {4, 4});
  CHECK_THROWS_WITH_AS(ops::StateCopyPlan({ops::temporal_state(state, 1)}, std::span(&good, 1), 16, Device{}),
                       "a state is of group 1, there are 1 block tables", InvalidArgument);
  const ops::StateCopyPlan plan({ops::temporal_state(state, 0)}, std::span(&good, 1), 16, Device{});
  std::vector<std::int32_t> values(4, 1);
  const TensorView vector = make_view(values.data(), DType::i32, {4});
  ThreadPool threads(1);
  const ops::StateCopyInputs inputs{.num_accepted_tokens = vector,
                                    .state_idx = vector,
                                    .num_computed_tokens = vector,
                                    .num_scheduled_tokens = vector};
  CHECK_THROWS_WITH_AS(ops::postprocess_states({.threads = &threads}, plan, 4, inputs, vector),
                       "an output is also an input: the inputs must be a snapshot", InvalidArgument);
}

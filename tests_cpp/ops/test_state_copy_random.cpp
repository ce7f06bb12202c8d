#include <algorithm>
#include <numeric>
#include <random>

#include <doctest/doctest.h>

#include "tests_cpp/support/state_pool.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

// A random pool, its tables and one step. Whatever is drawn keeps the promise that no slot is written by one request
// and read or written by another.
struct RandomCase {
  StatePool pool;
  StepVectors step;
  StateOp op = StateOp::postprocess;
  int num_reqs = 0;

  RandomCase(std::uint32_t seed, int max_reqs, bool with_garbage) : rng_(seed) {
    op = static_cast<StateOp>(draw(0, 2));
    num_reqs = draw(0, 3) == 0 ? draw(1, max_reqs) : draw(1, std::min(max_reqs, 8));
    speculative_ = draw(0, 4);
    pool.block_size = std::array{1, 4, 16, 64, 528}[draw(0, 4)];
    draw_tables();
    draw_states();
    for (int row = 0; row < num_reqs; ++row) draw_row(row, with_garbage);
    if (draw(0, 2) == 0) permute_slots();
    pool.memory = random_bytes(pool.memory.size(), seed);
  }

 private:
  int draw(int low, int high) { return std::uniform_int_distribution(low, high)(rng_); }

  void draw_tables() {
    num_columns_ = speculative_ + draw(2, 5);
    pool.tables.resize(draw(1, 3));
    std::int32_t num_slots = 1;
    for (auto& table : pool.tables) {
      table.assign(num_reqs + draw(0, 2), std::vector<std::int32_t>(num_columns_ + draw(0, 3)));
      for (auto& row : table)
        for (auto& slot : row) slot = num_slots++;
    }
    num_shared_ = draw(1, 3);
    shared_ = num_slots;
    pool.num_slots = num_slots + num_shared_;
    if (draw(0, 1) == 0) pool.table_stride = 16 + draw(0, 40);
  }

  void draw_states() {
    const bool large = num_reqs <= 4 && draw(0, 3) == 0;  // several tiles of a state
    const int num_layers = draw(1, 4);
    for (int i = 0; i < num_layers; ++i) {
      const int group = draw(0, static_cast<int>(pool.tables.size()) - 1);
      std::vector<PoolState> layer;
      std::int64_t elem_size = 1 << draw(0, 3);
      const bool same_elem = draw(0, 1) == 0;
      if (draw(0, 4) > 0) {
        PoolState conv{.elem_size = elem_size,
                       .width = draw(1, 3 + speculative_),
                       .dim = draw(1, large ? 3000 : 40),
                       .group = group};
        if (draw(0, 1) == 0) conv.dim = (conv.dim + 7) / 8 * 8;
        conv.layout = static_cast<ops::ConvLayout>(draw(0, 1));
        if (conv.layout == ops::ConvLayout::ds && draw(0, 2) == 0) conv.row_pitch = conv.width + draw(1, 3);
        layer.push_back(conv);
      }
      if (layer.empty() || draw(0, 3) > 0) {
        if (!same_elem) elem_size = 1 << draw(0, 3);
        layer.push_back({.is_conv = false, .elem_size = elem_size, .dim = draw(1, large ? 40000 : 60), .group = group});
        // Keeps the strides of both states whole numbers of elements.
        if (layer.size() == 2 && layer[0].num_bytes() % elem_size != 0) layer[1].elem_size = layer[0].elem_size;
      }
      pool.add_layer(layer, draw(0, 1) == 0 ? 0 : draw(0, 40), draw(0, 1) == 0 ? 0 : 8 * draw(1, 20));
    }
  }

  void draw_row(int row, bool with_garbage) {
    int accepted = draw(1, 1 + speculative_);
    const int max_tokens = pool.block_size * (num_columns_ - speculative_);
    // Half of the rows end within a few tokens of a boundary.
    int certain = draw(1, max_tokens);
    if (draw(0, 1) == 0)
      certain = std::clamp(certain / pool.block_size * pool.block_size - draw(-1, speculative_), 1, max_tokens);
    const int drafts = draw(0, speculative_);
    const int scheduled = draw(0, 2) == 0 ? std::min(certain, draw(1, 100)) + drafts : 1 + drafts;
    const int running =
        std::min((certain + drafts + pool.block_size - 1) / pool.block_size - 1, num_columns_ - 1 - speculative_);
    int state_idx = draw(0, 2) == 0 ? draw(0, std::max(running, 0)) : std::max(running, 0);
    if (with_garbage && draw(0, 9) == 0) accepted = std::array{0, -1, speculative_ + 2, 1 << 30}[draw(0, 3)];
    if (with_garbage && draw(0, 19) == 0) state_idx = std::array{-1, -5, num_columns_ + 100}[draw(0, 2)];
    step.accepted.push_back(accepted), step.state_idx.push_back(state_idx), step.drafts.push_back(drafts);
    step.computed.push_back(certain + drafts - scheduled), step.scheduled.push_back(scheduled);
    step.new_computed.push_back(static_cast<std::int32_t>(std::int64_t{certain} + accepted - 1));
    alias_sources(row, state_idx);
  }

  // Columns up to the running one may be slots that other rows use too (a shared prefix), the same slot twice, or none,
  // unless this row writes them.
  void alias_sources(int row, int state_idx) {
    const int kind = draw(0, 5);
    for (auto& table : pool.tables) {
      auto& slots = table[row];
      if (kind == 0 && state_idx >= 0 && state_idx + 1 < num_columns_) slots[state_idx + 1] = slots[state_idx];
      if (kind == 1 && state_idx >= 0 && state_idx < num_columns_ && !writes(row, state_idx))
        slots[state_idx] = shared_ + draw(0, num_shared_ - 1);
      if (kind == 2) slots[draw(0, static_cast<int>(slots.size()) - 1)] = draw(-1, 0);
    }
  }

  bool writes(int row, int column) const {
    const std::int64_t tokens = op == StateOp::preprocess
                                    ? std::int64_t{step.computed[row]} + step.scheduled[row] + pool.block_size - 1
                                    : step.new_computed[row];
    return tokens / pool.block_size - 1 == column;
  }

  // Puts the vectors in the order of slot ids, with idle ones between them, and skips a row now and then.
  void permute_slots() {
    const int num_ids = num_reqs + draw(0, 5);
    std::vector<std::int32_t> ids(num_ids);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng_);
    for (auto* values :
         {&step.accepted, &step.state_idx, &step.computed, &step.scheduled, &step.drafts, &step.new_computed}) {
      std::vector<std::int32_t> moved(num_ids, -77);
      for (int row = 0; row < num_reqs; ++row) moved[ids[row]] = (*values)[row];
      *values = moved;
    }
    ids.resize(num_reqs);
    for (auto& id : ids)
      if (draw(0, 9) == 0) id = -1;
    step.slot_ids = ids;
  }

  std::mt19937 rng_;
  int speculative_ = 0, num_columns_ = 0, num_shared_ = 0;
  std::int32_t shared_ = 0;
};

}  // namespace

TEST_CASE("40 small steps of every kind [sanitizer]") {
  for (std::uint32_t seed = 5000; seed < 5040; ++seed)
    for (const Device device : devices()) {
      const RandomCase c(seed, 8, /*with_garbage=*/device.type == DeviceType::cuda);
      CAPTURE(seed);
      CHECK(c.pool.run(c.op, c.num_reqs, c.step, device) == c.pool.reference(c.op, c.num_reqs, c.step));
    }
}

TEST_CASE("fused state copies agree with the reference on random pools") {
#ifdef NDEBUG
  constexpr bool kCpuTakesGarbage = true;
#else
  constexpr bool kCpuTakesGarbage = false;
#endif
  int num_copying = 0, num_idle = 0;
  for (std::uint32_t seed = 0; seed < 2400; ++seed) {
    for (const Device device : devices()) {
      const bool garbage = device.type == DeviceType::cuda || kCpuTakesGarbage;
      const RandomCase c(seed, seed % 40 == 0 ? 256 : 24, garbage);
      const auto expected = c.pool.reference(c.op, c.num_reqs, c.step);
      const auto result = c.pool.run(c.op, c.num_reqs, c.step, device);
      (expected.memory == c.pool.memory ? num_idle : num_copying) += 1;
      CAPTURE(seed);
      CAPTURE(static_cast<int>(device.type));
      CAPTURE(static_cast<int>(c.op));
      CAPTURE(c.num_reqs);
      REQUIRE(result.accepted == expected.accepted);
      REQUIRE(result.state_idx == expected.state_idx);
      REQUIRE(result.memory == expected.memory);
    }
  }
  MESSAGE(num_copying, " steps copied, ", num_idle, " did not");
  CHECK(num_copying > 1000);
  CHECK(num_idle > 50);
}

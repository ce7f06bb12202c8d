#include <doctest/doctest.h>

#include <algorithm>
#include <queue>
#include <random>
#include <set>

#include "cpp/src/runner/batch_reorder.h"
#include "tests_cpp/runner/rows.h"

using namespace deltaic;
using test::make_row;
using enum RowRegion;

namespace {

std::vector<RowRegion> swapped(std::vector<RowRegion> regions, std::span<const std::pair<int, int>> swaps) {
  for (const auto& [a, b] : swaps)
    std::swap(regions[static_cast<std::size_t>(a)], regions[static_cast<std::size_t>(b)]);
  return regions;
}

// By breadth-first search over all orders.
std::size_t fewest_swaps(const std::vector<RowRegion>& regions) {
  std::vector<RowRegion> sorted = regions;
  std::sort(sorted.begin(), sorted.end());
  std::set<std::vector<RowRegion>> seen{regions};
  std::queue<std::pair<std::vector<RowRegion>, std::size_t>> queue;
  queue.emplace(regions, 0);
  while (true) {
    auto [order, distance] = queue.front();
    queue.pop();
    if (order == sorted) return distance;
    for (std::size_t a = 0; a < order.size(); ++a)
      for (std::size_t b = a + 1; b < order.size(); ++b) {
        auto next = order;
        std::swap(next[a], next[b]);
        if (seen.insert(next).second) queue.emplace(next, distance + 1);
      }
  }
}

// The order of ids after the reorder of rows with these ids and regions.
std::vector<std::string> reordered(const std::vector<std::pair<std::string, RowRegion>>& rows) {
  std::vector<RowRegion> regions;
  std::vector<std::string> ids;
  for (const auto& [id, region] : rows) regions.push_back(region), ids.push_back(id);
  BatchReorder reorder;
  for (const auto& [a, b] : reorder.plan(regions))
    std::swap(ids[static_cast<std::size_t>(a)], ids[static_cast<std::size_t>(b)]);
  return ids;
}

}  // namespace

TEST_CASE("past its known prefill and scheduled = 1 + its drafts is a decode, whatever the number of drafts") {
  for (const int drafts : {0, 1, 3, 7}) {
    CAPTURE(drafts);
    CHECK(region_of(make_row({"a", 3, 4, 3, 1 + drafts, drafts})) == decode);
  }
  // The sample of the step before may not be known yet.
  CHECK(region_of(make_row({"a", 3, 3, 3, 1})) == decode);
}

TEST_CASE("computed 0 is a prefill, also with one token") {
  CHECK(region_of(make_row({"a", 1, 1, 0, 1})) == prefill);
  CHECK(region_of(make_row({"a", 9, 9, 0, 4})) == prefill);
}

TEST_CASE("scheduled > 1 and has context is a long extend") {
  CHECK(region_of(make_row({"a", 9, 9, 4, 5})) == long_extend);
  CHECK(region_of(make_row({"a", 9, 9, 4, 2})) == long_extend);
}

TEST_CASE("one token, still inside its known prefill, is a short extend") {
  CHECK(region_of(make_row({"a", 9, 9, 8, 1})) == short_extend);
  CHECK(region_of(make_row({"a", 9, 9, 4, 1})) == short_extend);
  // A request that came back after a preemption, inside the output that it had.
  CHECK(region_of(make_row({"a", 3, 9, 5, 1})) == short_extend);
}

TEST_CASE("[P0, P1, D] becomes [D, P1, P0]") {
  CHECK(reordered({{"P0", prefill}, {"P1", prefill}, {"D", decode}}) == std::vector<std::string>{"D", "P1", "P0"});
}

TEST_CASE("two prefills keep their order") {
  CHECK(reordered({{"P0", prefill}, {"P1", prefill}}) == std::vector<std::string>{"P0", "P1"});
  CHECK(reordered({{"D", decode}, {"P0", prefill}, {"P1", prefill}}) == std::vector<std::string>{"D", "P0", "P1"});
}

TEST_CASE("rows already inside their region's span do not move") {
  CHECK(reordered({{"P0", prefill},
                   {"D0", decode},
                   {"L", long_extend},
                   {"S", short_extend},
                   {"P1", prefill},
                   {"D1", decode}}) == std::vector<std::string>{"D1", "D0", "S", "L", "P1", "P0"});
}

TEST_CASE("rows that do not run come behind all that do") {
  CHECK(reordered({{"I", idle}, {"P", prefill}, {"D", decode}}) == std::vector<std::string>{"D", "P", "I"});
}

TEST_CASE("rows are arranged by ascending region with the fewest swaps") {
  std::mt19937 rng(7);
  BatchReorder reorder;
  for (int repeat = 0; repeat < 400; ++repeat) {
    std::vector<RowRegion> regions(1 + rng() % 7);
    for (RowRegion& region : regions) region = static_cast<RowRegion>(rng() % kNumRegions);
    const auto swaps = reorder.plan(regions);
    const auto order = swapped(regions, swaps);
    CHECK(std::is_sorted(order.begin(), order.end()));
    CHECK(swaps.size() == fewest_swaps(regions));
  }
}

TEST_CASE("the fewest swaps, two pairs and two cycles of three") {
  const std::vector<RowRegion> regions{short_extend, short_extend, long_extend, decode,
                                       long_extend,  prefill,      prefill,     decode};
  BatchReorder reorder;
  CHECK(reorder.plan(regions).size() == fewest_swaps(regions));
}

TEST_CASE("a swap carries every per-row field") {
  const std::vector<std::int64_t> strides{4, 2};
  InputBatch batch(4, strides);
  BatchRow fresh = make_row({"P", 5, 5, 0, 5});
  fresh.sampling_params.temperature = 0.7F;
  fresh.seed = 12345, fresh.is_seeded = true;
  batch.add(std::move(fresh), std::vector<std::vector<int>>{{2, 3, 1}, {1}});
  BatchRow old = make_row({"D", 3, 3, 3, 1});
  old.sampling_params.temperature = 0.0F;
  old.state_slot = 9;
  batch.add(std::move(old), std::vector<std::vector<int>>{{0}, {}});
  batch.row(1).num_accepted_tokens = 3;
  batch.append_sampled_token(1, 77);

  BatchReorder reorder;
  const auto counts = reorder.apply(batch);
  CHECK(counts == std::array<int, kNumRegions>{1, 0, 0, 1, 0});
  CHECK(batch.req_ids() == std::vector<std::string>{"D", "P"});
  CHECK(batch.find("D") == 0);
  CHECK(batch.find("P") == 1);
  const BatchRow& decode_row = batch.row(0);
  CHECK(decode_row.token_ids == std::vector<std::int32_t>{0, 1, 2, 77});
  CHECK(decode_row.num_computed_tokens == 3);
  CHECK(decode_row.prefill_length == 3);
  CHECK(decode_row.num_accepted_tokens == 3);
  CHECK(decode_row.state_slot == 9);
  CHECK(batch.last_sampled_tokens()[0] == 77);
  CHECK(batch.last_sampled_tokens()[1] == 0);
  CHECK(batch.row(1).num_tokens() == 5);
  CHECK(batch.row(1).prefill_length == 5);
  CHECK(batch.row(1).seed == 12345);
  CHECK(batch.row(1).sampling_params.temperature == 0.7F);
  const auto ids = [&](int group, int row) {
    const auto span = batch.block_table(group).row(row);
    return std::vector<int>(span.begin(), span.end());
  };
  CHECK(ids(0, 0) == std::vector<int>{0});
  CHECK(ids(0, 1) == std::vector<int>{2, 3, 1});
  CHECK(ids(1, 0).empty());
  CHECK(ids(1, 1) == std::vector<int>{1});
  // What the longer row left behind in its old place is null.
  const auto* entries = batch.block_table(0).view(1).as<std::int32_t>();
  CHECK(std::vector<int>(entries, entries + 4) ==
        std::vector<int>{0, BlockTable::kNull, BlockTable::kNull, BlockTable::kNull});
}

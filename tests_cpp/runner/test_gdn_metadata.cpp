#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/runner/attention_metadata.h"
#include "cpp/src/runner/gdn_metadata.h"
#include "tests_cpp/runner/rows.h"

using namespace deltaic;
using test::make_row;

TEST_CASE("validate_gdn_state_indices accepts unique indices in range, -1 being an inert padding row") {
  const std::vector<std::int32_t> indices{2, -1, 0, -1};
  CHECK_NOTHROW(validate_gdn_state_indices(indices, 4, 3));
  CHECK_NOTHROW(validate_gdn_state_indices(indices, 2, 3));
  CHECK_NOTHROW(validate_gdn_state_indices({}, 0, 0));
}

TEST_CASE("validate_gdn_state_indices throws on a duplicate, out of range, another negative, too few, naming the row") {
  const auto validate = [](std::vector<std::int32_t> indices, int required, int num_slots) {
    validate_gdn_state_indices(indices, required, num_slots);
  };
  CHECK_THROWS_WITH_AS(validate({1, 0, 1}, 3, 2), "GDN state index of row 2 is 1, which row 0 has too",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(validate({0, 2}, 2, 2), "GDN state index of row 1 is 2, but there are 2 slots", InvalidArgument);
  CHECK_THROWS_WITH_AS(validate({0, -2}, 2, 2),
                       "GDN state index of row 1 is -2; the only negative index is -1, for padding", InvalidArgument);
  CHECK_THROWS_WITH_AS(validate({0, 1}, 3, 2), "GDN state indices: 2 entries, 3 rows need one; row 2 has none",
                       InvalidArgument);
  CHECK_THROWS_AS(validate({0}, 1, 0), InvalidArgument);
}

TEST_CASE("GDN metadata is leading decodes, then prefills; prefill sub-arrays are rebased") {
  const std::vector<std::int64_t> strides{4};
  InputBatch batch(4, strides);
  int slot = 5;
  for (const auto& spec : {test::RowSpec{"a", 3, 4, 3, 1}, {"b", 2, 4, 3, 1}, {"c", 9, 9, 4, 5}, {"d", 1, 1, 0, 1}}) {
    BatchRow row = make_row(spec);
    row.state_slot = slot--;
    batch.add(std::move(row), std::vector<std::vector<int>>{{}});
  }
  StepInputs inputs;
  build_step_inputs(batch, 4, false, inputs);
  GdnMetadata metadata;
  build_gdn_metadata(batch, 4, 2, /*with_speculation=*/false, inputs.query_start_loc, 6, metadata);
  CHECK(metadata.view.num_decodes == 2);
  CHECK(metadata.view.num_prefills == 2);
  CHECK(metadata.view.num_decode_tokens == 2);
  CHECK(metadata.view.num_prefill_tokens == 6);
  CHECK(metadata.view.state_indices == std::vector<std::int32_t>{5, 4, 3, 2});
  CHECK(metadata.view.prefill_state_indices == std::vector<std::int32_t>{3, 2});
  CHECK(metadata.view.prefill_query_start_loc == std::vector<std::int32_t>{0, 5, 6});
  // A fresh prompt of one token has no initial state.
  CHECK(metadata.view.has_initial_state == std::vector<bool>{true, true, true, false});
  CHECK(metadata.has_initial_state == std::vector<std::uint8_t>{1, 1, 1, 0});
  CHECK(metadata.snapshot_slots.empty());
}

TEST_CASE("with speculation decodes are verified, and those behind a verified step replay it") {
  const std::vector<std::int64_t> strides{4};
  InputBatch batch(3, strides);
  int slot = 0;
  for (const auto& spec : {test::RowSpec{"a", 3, 4, 3, 1}, {"b", 2, 4, 3, 1}, {"c", 9, 9, 4, 5}}) {
    BatchRow row = make_row(spec);
    row.state_slot = slot++;
    batch.add(std::move(row), std::vector<std::vector<int>>{{}});
  }
  batch.row(1).has_replay = true;
  batch.row(1).num_accepted_tokens = 3;
  StepInputs inputs;
  build_step_inputs(batch, 3, false, inputs);
  GdnMetadata metadata;
  build_gdn_metadata(batch, 3, 2, /*with_speculation=*/true, inputs.query_start_loc, 3, metadata);
  CHECK(metadata.has_initial_state == std::vector<std::uint8_t>{1, 2, 1});
  CHECK(metadata.view.num_accepted_tokens == std::vector<std::int32_t>{1, 3, 0});
  CHECK(metadata.snapshot_slots == std::vector<std::int32_t>{-1, -1, -1});
}

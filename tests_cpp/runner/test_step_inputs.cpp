#include <doctest/doctest.h>

#include "cpp/src/runner/attention_metadata.h"
#include "tests_cpp/runner/rows.h"

using namespace deltaic;
using test::make_row;

namespace {

InputBatch make_batch(const std::vector<test::RowSpec>& specs, const std::vector<std::vector<int>>& blocks) {
  const std::vector<std::int64_t> strides{4};
  InputBatch batch(4, strides);
  for (std::size_t i = 0; i < specs.size(); ++i)
    batch.add(make_row(specs[i]), std::vector<std::vector<int>>{blocks[i]});
  return batch;
}

using Ints = std::vector<std::int32_t>;
using Longs = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("position = computed + j, seq_len = computed + scheduled, logits index = query_start_loc[i + 1] - 1") {
  const InputBatch batch = make_batch({{"a", 3, 4, 3, 1}, {"b", 9, 9, 4, 5}, {"c", 2, 2, 0, 2}}, {{0}, {5, 6, 7}, {3}});
  StepInputs inputs;
  build_step_inputs(batch, 3, false, inputs);
  CHECK(inputs.query_start_loc == Ints{0, 1, 6, 8});
  CHECK(inputs.logits_indices == Ints{0, 5, 7});
  CHECK(inputs.positions == Longs{3, 4, 5, 6, 7, 8, 0, 1});
  CHECK(inputs.input_token_ids == Ints{3, 4, 5, 6, 7, 8, 0, 1});
  AttentionMetadataView metadata;
  build_attention_metadata(batch, 3, 0, 4, metadata);
  CHECK(metadata.seq_lens == Ints{4, 9, 2});
  CHECK(metadata.slot_mapping == Longs{3, 24, 25, 26, 27, 28, 12, 13});
  CHECK(metadata.block_table_row_stride == 4);
}

TEST_CASE("only the rows that run are built, and a smaller step leaves nothing of a larger one") {
  InputBatch batch = make_batch({{"a", 4, 4, 0, 4}, {"b", 2, 2, 0, 2}}, {{0}, {1}});
  StepInputs inputs;
  build_step_inputs(batch, 2, false, inputs);
  build_step_inputs(batch, 1, false, inputs);
  CHECK(inputs.query_start_loc == Ints{0, 4});
  CHECK(inputs.positions.size() == 4);
  build_step_inputs(batch, 0, false, inputs);
  CHECK(inputs.query_start_loc == Ints{0});
  CHECK(inputs.input_token_ids.empty());
}

TEST_CASE("the last input id is last_sampled_tokens[row] if and only if seq_len > prefill length") {
  InputBatch batch = make_batch({{"a", 3, 3, 3, 1}, {"b", 3, 3, 1, 2}, {"c", 3, 3, 3, 1}}, {{0}, {1}, {2}});
  for (int row = 0; row < 2; ++row) batch.append_sampled_token(row, 40 + row);
  SUBCASE("a stale host token at that column is never seen") { batch.row(0).token_ids[3] = 99; }
  SUBCASE("the host need not know the token") { batch.row(0).token_ids.pop_back(); }
  StepInputs inputs;
  build_step_inputs(batch, 3, true, inputs);
  CHECK(inputs.input_token_ids == Ints{40, 1, 2, 0});
  CHECK(inputs.positions == Longs{3, 1, 2, 3});
}

TEST_CASE("without input combine the row's own token is the input") {
  InputBatch batch = make_batch({{"a", 3, 3, 3, 1}}, {{0}});
  batch.append_sampled_token(0, 40);
  batch.row(0).token_ids[3] = 99;
  StepInputs inputs;
  build_step_inputs(batch, 1, false, inputs);
  CHECK(inputs.input_token_ids == Ints{99});
}

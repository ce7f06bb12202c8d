#include <doctest/doctest.h>

#include "tests_cpp/runner/rows.h"

using namespace deltaic;
using test::make_row;

namespace {

using Ids = std::vector<std::string>;

InputBatch make_batch(const Ids& ids) {
  const std::vector<std::int64_t> strides{4};
  InputBatch batch(4, strides);
  int block = 0;
  for (const std::string& id : ids) batch.add(make_row({id, 2}), std::vector<std::vector<int>>{{block++}});
  return batch;
}

}  // namespace

TEST_CASE("new requests go into the lowest hole, else are appended") {
  InputBatch batch = make_batch({"a", "b", "c"});
  batch.remove(1);
  batch.remove(0);
  CHECK(batch.add(make_row({"d", 2}), std::vector<std::vector<int>>{{9}}) == 0);
  CHECK(batch.add(make_row({"e", 2}), std::vector<std::vector<int>>{{8}}) == 1);
  CHECK(batch.add(make_row({"f", 2}), std::vector<std::vector<int>>{{7}}) == 3);
  batch.condense();
  CHECK(batch.req_ids() == Ids{"d", "e", "c", "f"});
}

TEST_CASE("the last active row moves into the lowest hole until the rows are dense") {
  InputBatch batch = make_batch({"a", "b", "c", "d"});
  batch.append_sampled_token(3, 55);
  batch.remove(2);
  batch.remove(0);
  batch.condense();
  CHECK(batch.req_ids() == Ids{"d", "b"});
  CHECK(batch.find("d") == 0);
  CHECK(batch.find("a") == -1);
  CHECK(batch.token_ids(0).back() == 55);
  CHECK(batch.last_sampled_tokens()[0] == 55);
  CHECK(batch.block_table(0).row(0)[0] == 3);
  // D62: the vacated row is null.
  CHECK(batch.block_table(0).num_blocks(3) == 0);
  CHECK(batch.block_table(0).view(4).as<std::int32_t>()[3 * 4] == BlockTable::kNull);
  CHECK(batch.last_sampled_tokens()[3] == 0);
}

TEST_CASE("rows that end behind the last live one leave no hole") {
  InputBatch batch = make_batch({"a", "b", "c", "d"});
  batch.remove(3);
  batch.remove(2);
  batch.remove(1);
  batch.condense();
  CHECK(batch.req_ids() == Ids{"a"});
  CHECK(batch.add(make_row({"e", 2}), std::vector<std::vector<int>>{{9}}) == 1);
  batch.remove(0);
  batch.remove(1);
  batch.condense();
  CHECK(batch.num_reqs() == 0);
  CHECK(batch.add(make_row({"f", 2}), std::vector<std::vector<int>>{{9}}) == 0);
}

TEST_CASE("D48, D49: a row's new owner starts with accepted count 1 and no last sampled token") {
  InputBatch batch = make_batch({"a"});
  batch.row(0).num_accepted_tokens = 4;
  batch.append_sampled_token(0, 123);
  CHECK(batch.last_sampled_tokens()[0] == 123);
  batch.remove(0);
  CHECK(batch.add(make_row({"b", 2}), std::vector<std::vector<int>>{{1}}) == 0);
  CHECK(batch.row(0).num_accepted_tokens == 1);
  CHECK(batch.last_sampled_tokens()[0] == 0);
}

TEST_CASE("generators maps row -> seed for seeded rows only; top_k outside (0, vocab) means vocab") {
  const std::vector<std::int64_t> strides{4};
  InputBatch batch(4, strides);
  const auto add = [&](const std::string& id, float temperature, int top_k, std::optional<std::int64_t> seed) {
    NewRequestData request;
    request.req_id = id;
    request.prompt_token_ids = {1};
    request.sampling_params.temperature = temperature;
    request.sampling_params.top_k = top_k;
    request.sampling_params.seed = seed;
    batch.add(make_batch_row(request), std::vector<std::vector<int>>{{}});
  };
  add("greedy", 0.0F, 0, std::nullopt);
  CHECK(batch.make_sampling_metadata(100).all_greedy);
  add("seeded", 0.7F, 2, 12345);
  add("unseeded", 1.0F, 100, std::nullopt);
  add("off", 0.0F, -1, std::nullopt);
  const SamplingMetadata metadata = batch.make_sampling_metadata(100);
  CHECK(metadata.temperature == std::vector<float>{0.0F, 0.7F, 1.0F, 0.0F});
  CHECK(metadata.top_k == std::vector<int>{100, 2, 100, 100});
  CHECK(metadata.generators == std::map<int, std::uint64_t>{{1, 12345}});
  CHECK_FALSE(metadata.all_greedy);
}

TEST_CASE("unseeded requests get a fresh random seed each") {
  NewRequestData request;
  request.req_id = "a";
  request.prompt_token_ids = {1};
  CHECK(make_batch_row(request).seed != make_batch_row(request).seed);
}

#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

TEST_CASE("the identity case holds field by field") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model, {.block_size = 8, .num_blocks = 8});
  const auto make_request = [](const std::string& req_id, Tokens prompt, std::vector<std::vector<int>> blocks) {
    NewRequestData request;
    request.req_id = req_id;
    request.prompt_token_ids = std::move(prompt);
    request.block_ids = std::move(blocks);
    request.sampling_params = greedy();
    return request;
  };
  NewRequestData fresh = make_request("P", prompt_of(5, 1), {{2, 3}, {1}});
  fresh.sampling_params.temperature = 0.7F;
  fresh.sampling_params.top_k = 2;
  fresh.sampling_params.seed = 12345;
  NewRequestData decode = make_request("D", prompt_of(3, 2), {{0, 1}, {0}});
  decode.prefill_token_ids = decode.prompt_token_ids;
  decode.prefill_token_ids.push_back(7);
  decode.num_computed_tokens = 3;
  SchedulerOutput step;
  step.scheduled_new_reqs = {fresh, decode};
  step.num_scheduled_tokens = {{"P", 5}, {"D", 1}};
  step.total_num_scheduled_tokens = 6;

  CHECK_FALSE(runner.execute_model(step).has_value());
  const InputBatch& batch = runner.input_batch();
  CHECK(batch.req_ids() == std::vector<std::string>{"D", "P"});
  CHECK(batch.req_id_to_index().at("D") == 0);
  CHECK(batch.req_id_to_index().at("P") == 1);
  const AttentionMetadataView& attention = runner.last_attn_meta();
  CHECK(attention.seq_lens == Tokens{4, 5});
  CHECK(attention.block_table_row_stride == 8);
  REQUIRE(attention.block_table.size() == 16);
  CHECK(attention.block_table[0] == 0);
  CHECK(attention.block_table[1] == 1);
  CHECK(attention.block_table[8] == 2);
  CHECK(attention.block_table[9] == 3);
  CHECK(attention.slot_mapping == std::vector<std::int64_t>{3, 16, 17, 18, 19, 20});
  const StepInputs& inputs = runner.last_step();
  CHECK(inputs.query_start_loc == Tokens{0, 1, 6});
  CHECK(inputs.logits_indices == Tokens{0, 5});
  CHECK(inputs.positions == std::vector<std::int64_t>{3, 0, 1, 2, 3, 4});
  Tokens expected_ids{7};
  for (const std::int32_t id : fresh.prompt_token_ids) expected_ids.push_back(id);
  CHECK(inputs.input_token_ids == expected_ids);
  const GdnMetadataView& gdn = runner.last_gdn_meta();
  CHECK(gdn.num_decodes == 1);
  CHECK(gdn.num_prefills == 1);
  CHECK(gdn.state_indices == Tokens{0, 1});
  CHECK(gdn.prefill_state_indices == Tokens{1});
  CHECK(gdn.has_initial_state == std::vector<bool>{true, false});
  CHECK(runner.gdn_state_slots() == std::map<std::string, int>{{"D", 0}, {"P", 1}});
  const auto mamba_blocks = [&](int row) { return batch.block_table(1).row(row)[0]; };
  CHECK(mamba_blocks(0) == 0);
  CHECK(mamba_blocks(1) == 1);
  const SamplingMetadata sampling = batch.make_sampling_metadata(model.config.vocab_size);
  CHECK_FALSE(sampling.all_greedy);
  CHECK(sampling.generators == std::map<int, std::uint64_t>{{1, 12345}});
  CHECK(sampling.temperature == std::vector<float>{0.0F, 0.7F});
  CHECK(sampling.top_k == std::vector<int>{model.config.vocab_size, 2});

  CHECK(batch.num_tokens(0) == 4);
  CHECK(batch.num_tokens(1) == 5);
  const ModelRunnerOutput output = runner.sample_tokens();
  CHECK(output.req_ids == std::vector<std::string>{"D", "P"});
  // D's state was never computed here, so what it samples is not looked at: NaN caches make it a failed row.
  CHECK(output.failed_req_ids == std::vector<std::string>{"D"});
  CHECK(batch.num_tokens(1) == 6);
  CHECK(batch.token_ids(1).back() == output.sampled_token_ids[1][0]);
  CHECK(batch.last_sampled_tokens()[1] == output.sampled_token_ids[1][0]);
}

TEST_CASE("identity case, sampling writes D's token into D's row (4 -> 5 tokens) and P's into P's (5 -> 6)") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.poison_caches = false;  // D's three computed tokens are taken from zeroed caches
  ModelRunner runner = make_runner(model, {.block_size = 8, .num_blocks = 8}, options);
  Step step(runner);
  step.admit("P", prompt_of(5, 1), {2, 3}, 5, seeded(12345, 0.7F)).sampling_params.top_k = 2;
  NewRequestData& decode = step.admit("D", prompt_of(3, 2), {0, 1}, 1, greedy(), 3);
  decode.prefill_token_ids = decode.prompt_token_ids;
  decode.prefill_token_ids.push_back(7);
  const ModelRunnerOutput output = run_step(runner, step);
  const InputBatch& batch = runner.input_batch();
  CHECK(output.failed_req_ids.empty());
  for (int row = 0; row < 2; ++row) {
    REQUIRE(output.sampled_token_ids[static_cast<std::size_t>(row)].size() == 1);
    CHECK(batch.num_tokens(row) == 5 + row);
    CHECK(batch.token_ids(row).back() == output.sampled_token_ids[static_cast<std::size_t>(row)][0]);
    CHECK(batch.last_sampled_tokens()[static_cast<std::size_t>(row)] == batch.token_ids(row).back());
  }
  // P, alone in another runner, gives the same token.
  ModelRunner alone = make_runner(model, {.block_size = 8, .num_blocks = 8});
  Step single(alone);
  single.admit("P", prompt_of(5, 1), {6, 4}, 5, seeded(12345, 0.7F)).sampling_params.top_k = 2;
  CHECK(run_step(alone, single).sampled_token_ids[0] == output.sampled_token_ids[1]);
}

TEST_CASE("all consumers read the order after the reorder") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const Tokens prompts[] = {prompt_of(5, 1), prompt_of(6, 2), prompt_of(3, 3), prompt_of(9, 4), prompt_of(7, 5)};
  Step first(runner);
  first.admit("L", prompts[3], {6, 7, 8}, 4);  // a long extend in the next step
  first.admit("S", prompts[4], {9, 10}, 6);    // a short extend
  first.admit("D", prompts[2], {0, 1}, 3);     // a decode
  run_step(runner, first);
  Tokens tokens_d = prompts[2];
  tokens_d.push_back(dense_argmax(runner, tokens_d));
  Step second(runner);
  second.run("L", 4, 5).run("S", 6, 1).run("D", 3, 1);
  second.admit("P0", prompts[0], {2, 3}, 5);
  second.admit("P1", prompts[1], {4, 5}, 6);
  const ModelRunnerOutput output = run_step(runner, second);
  CHECK(output.req_ids == std::vector<std::string>{"D", "S", "L", "P0", "P1"});
  CHECK(runner.last_attn_meta().seq_lens == Tokens{4, 7, 9, 5, 6});
  CHECK(runner.last_gdn_meta().num_decodes == 1);
  CHECK(runner.last_gdn_meta().num_prefills == 4);
  CHECK(runner.last_gdn_meta().has_initial_state == std::vector<bool>{true, true, true, false, false});
  CHECK(runner.last_gdn_meta().prefill_query_start_loc == Tokens{0, 1, 6, 11, 17});
  CHECK(output.sampled_token_ids == std::vector<Tokens>{{dense_argmax(runner, tokens_d)},
                                                        {dense_argmax(runner, prompts[4])},
                                                        {dense_argmax(runner, prompts[3])},
                                                        {dense_argmax(runner, prompts[0])},
                                                        {dense_argmax(runner, prompts[1])}});
}

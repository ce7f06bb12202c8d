#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

using Ids = std::vector<std::string>;

}  // namespace

TEST_CASE("finished ids are dropped, then diffs applied, then new requests take the lowest hole") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  first.admit("b", prompt_of(4, 2), {1}, 4);
  first.admit("c", prompt_of(3, 3), {2}, 3);
  run_step(runner, first);
  // All three decode; a ends, d comes: d takes row 0, and the reorder brings it behind the decodes.
  Step second(runner);
  second.finish("a");
  second.run("b", 4, 1, {5}).run("c", 3, 1);
  second.admit("d", prompt_of(5, 4), {3, 4}, 5);
  const ModelRunnerOutput output = run_step(runner, second);
  CHECK(output.req_ids == Ids{"c", "b", "d"});
  CHECK(output.req_id_to_index == std::unordered_map<std::string, int>{{"c", 0}, {"b", 1}, {"d", 2}});
  CHECK(runner.input_batch().req_ids() == Ids{"c", "b", "d"});
  CHECK(runner.input_batch().find("a") == -1);
  const auto blocks = runner.input_batch().block_table(0).row(1);
  CHECK(std::vector(blocks.begin(), blocks.end()) == std::vector<std::int32_t>{1, 5});
}

TEST_CASE("a cached id that is not known is ignored") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  run_step(runner, first);
  Step second(runner);
  second.run("ghost", 5, 1, {9}).run("a", 3, 1);
  const ModelRunnerOutput output = run_step(runner, second);
  CHECK(output.req_ids == Ids{"a"});
  CHECK(runner.input_batch().num_reqs() == 1);
}

TEST_CASE("a request that is alive but not scheduled keeps its state slot and its row data") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const Tokens prompt_a = prompt_of(3, 1);
  const Tokens prompt_b = prompt_of(4, 2);
  Step first(runner);
  first.admit("a", prompt_a, {0, 1}, 3);
  first.admit("b", prompt_b, {2, 3}, 4);
  run_step(runner, first);
  const auto slots = runner.gdn_state_slots();
  Tokens tokens_b = prompt_b;
  tokens_b.push_back(dense_argmax(runner, prompt_b));
  for (int i = 0; i < 3; ++i) {
    Step alone(runner);
    alone.run("b", 4 + i, 1);
    const ModelRunnerOutput output = run_step(runner, alone);
    CHECK(output.req_ids == Ids{"b"});
    CHECK(output.sampled_token_ids == std::vector<Tokens>{{dense_argmax(runner, tokens_b)}});
    tokens_b.push_back(output.sampled_token_ids[0][0]);
    CHECK(runner.gdn_state_slots() == slots);
    CHECK(runner.input_batch().num_reqs() == 2);
    CHECK(runner.last_gdn_meta().state_indices == Tokens{slots.at("b")});
  }
  Tokens tokens_a = prompt_a;
  tokens_a.push_back(dense_argmax(runner, prompt_a));
  CHECK(runner.input_batch().row(runner.input_batch().find("a")).token_ids == tokens_a);
  Step both(runner);
  both.run("a", 3, 1).run("b", 7, 1);
  const ModelRunnerOutput output = run_step(runner, both);
  const auto of = [&](const std::string& id) {
    return output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at(id))];
  };
  CHECK(of("a") == Tokens{dense_argmax(runner, tokens_a)});
  CHECK(of("b") == Tokens{dense_argmax(runner, tokens_b)});
}

TEST_CASE("a pre-empted request comes back as a new one whose prefill ids are prompt + produced tokens") {
  const TinyModel model = tiny_qwen3_5();
  for (const int chunk : {1000, 3, 1}) {
    CAPTURE(chunk);
    Engine engine(make_runner(model), Engine::Output::sync, chunk);
    const Tokens expected_a = dense_greedy(engine.runner, prompt_of(5, 1), 8);
    const Tokens expected_b = dense_greedy(engine.runner, prompt_of(4, 2), 8);
    engine.add("a", prompt_of(5, 1)), engine.add("b", prompt_of(4, 2));
    engine.generate("b", 3);
    engine.preempt("b");
    engine.generate("a", 6);
    engine.preempt("a"), engine.preempt("b");
    CHECK(engine.generate("a", 8) == expected_a);
    CHECK(engine.generate("b", 8) == expected_b);
  }
}

TEST_CASE("resumed ids are accepted from callers: their blocks replace the row's and nothing is computed any more") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const Tokens prompt = prompt_of(5, 1);
  Tokens tokens = prompt;
  Step first(runner);
  first.admit("a", prompt, {0, 1}, 5);
  tokens.push_back(run_step(runner, first).sampled_token_ids[0][0]);

  Step away(runner);
  away.preempt("a");
  away.admit("b", prompt_of(3, 2), {0}, 3);
  run_step(runner, away);
  CHECK(runner.input_batch().find("a") == -1);
  Step back(runner);
  back.run("b", 3, 1).run("a", 0, 6, {4, 5}, 1);
  back.output.scheduled_cached_reqs.num_output_tokens = {1, 1};
  back.output.scheduled_cached_reqs.resumed_req_ids = {"a"};
  const ModelRunnerOutput output = run_step(runner, back);
  CHECK(output.req_ids == Ids{"b", "a"});
  CHECK(output.sampled_token_ids[1] == Tokens{dense_argmax(runner, tokens)});

  SUBCASE("also for a row that never left") {
    Step again(runner);
    again.run("a", 0, 6, {7, 8}, 1);
    again.output.scheduled_cached_reqs.resumed_req_ids = {"a"};
    CHECK(run_step(runner, again).sampled_token_ids[0] == Tokens{dense_argmax(runner, tokens)});
    const auto blocks = runner.input_batch().block_table(0).row(0);
    CHECK(std::vector(blocks.begin(), blocks.end()) == std::vector<std::int32_t>{7, 8});
  }
}

TEST_CASE("output tokens that the scheduler discarded are forgotten") {
  const TinyModel model = tiny_qwen3();
  ModelRunner runner = make_runner(model);
  const Tokens prompt = prompt_of(3, 1);
  Step first(runner);
  first.admit("a", prompt, {0, 1, 2}, 3);
  Tokens tokens = prompt;
  tokens.push_back(run_step(runner, first).sampled_token_ids[0][0]);
  for (int i = 0; i < 2; ++i) {
    Step step(runner);
    step.run("a", 3 + i, 1, {}, 1 + i);
    run_step(runner, step);
  }
  CHECK(runner.input_batch().num_tokens(0) == 6);
  Step back(runner);
  back.run("a", 3, 1, {}, 1);
  CHECK(run_step(runner, back).sampled_token_ids[0] == Tokens{dense_argmax(runner, tokens)});
  CHECK(runner.input_batch().num_tokens(0) == 5);
}

TEST_CASE("D77: a request may end in every state, and an unknown id may end too") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const Tokens prompt = prompt_of(5, 5);
  Step first(runner);
  first.finish("unknown").preempt("unknown too");
  first.admit("chunked", prompt_of(9, 1), {0, 1, 2}, 4);
  first.admit("waiting", prompt_of(3, 2), {3}, 0);
  first.admit("preempted", prompt_of(3, 3), {4}, 3);
  first.admit("both", prompt_of(3, 4), {5}, 3);
  run_step(runner, first);
  Step second(runner);
  second.preempt("preempted");
  run_step(runner, second);
  Step third(runner);
  third.finish("chunked").finish("waiting").finish("preempted").finish("both").finish("both").preempt("both");
  third.admit("next", prompt, {0, 1}, 5);
  const ModelRunnerOutput output = run_step(runner, third);
  CHECK(output.req_ids == Ids{"next"});
  CHECK(output.sampled_token_ids == std::vector<Tokens>{{dense_argmax(runner, prompt)}});
  CHECK(runner.gdn_state_slots() == std::map<std::string, int>{{"next", 0}});
  // What ended does not come back: a resumed id without a row is ignored.
  Step fourth(runner);
  fourth.run("preempted", 0, 3, {4}).run("next", 5, 1);
  fourth.output.scheduled_cached_reqs.resumed_req_ids = {"preempted"};
  CHECK(run_step(runner, fourth).req_ids == Ids{"next"});
}

TEST_CASE("D62: block-table entries of vacated rows are inert: no live block changes") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step first(runner);
  first.admit("x", prompt_of(9, 1), {7, 8, 9}, 9);
  first.admit("y", prompt_of(6, 2), {4, 5}, 6);
  run_step(runner, first);
  Step second(runner);
  second.finish("x").run("y", 6, 1);
  run_step(runner, second);
  const BlockTable& table = runner.input_batch().block_table(0);
  CHECK(runner.input_batch().req_ids() == Ids{"y"});
  const auto* entries = table.view(2).as<std::int32_t>() + table.row_stride();
  for (int i = 0; i < table.row_stride(); ++i) CHECK(entries[i] == BlockTable::kNull);

  // x's blocks go to another request; steps of y alone leave them as they are.
  Step third(runner);
  third.admit("z", prompt_of(9, 3), {7, 8, 9}, 9);
  run_step(runner, third);
  const TensorView k = runner.attn_kv()[0].k;
  const auto page = [&](int block) { return host_row<float>(k, block); };
  const auto before = std::vector{page(7), page(8)};
  Step fourth(runner);
  fourth.run("y", 7, 1);
  run_step(runner, fourth);
  Step idle(runner);
  run_step(runner, idle);
  CHECK(std::vector{page(7), page(8)} == before);
}

#include <doctest/doctest.h>

#include <random>
#include <set>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

TEST_CASE("execute_model returns nothing when a forward ran; an empty batch gives an empty output") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const auto empty = runner.execute_model(SchedulerOutput{});
  REQUIRE(empty.has_value());
  CHECK(empty->req_ids.empty());
  CHECK(empty->sampled_token_ids.empty());
  CHECK_THROWS_AS(runner.sample_tokens(), InvalidArgument);
  Step step(runner);
  step.admit("a", prompt_of(3, 1), {0}, 3);
  CHECK_FALSE(runner.execute_model(step.output).has_value());
  CHECK(runner.sample_tokens().sampled_token_ids.size() == 1);
  CHECK_THROWS_WITH_AS(runner.sample_tokens(), "sample_tokens needs a forward that was not sampled yet",
                       InvalidArgument);
  Step end(runner);
  end.finish("a");
  CHECK(runner.execute_model(end.output).has_value());
  CHECK(runner.input_batch().num_reqs() == 0);
  CHECK(runner.last_step().input_token_ids.empty());
  CHECK(runner.last_attn_meta().seq_lens.empty());
}

TEST_CASE("execute_model may be called again without sampling, and a decode whose token was never sampled still runs") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  CHECK_FALSE(runner.execute_model(first.output).has_value());
  Step second(runner);
  second.run("a", 3, 1, {1});
  CHECK_FALSE(runner.execute_model(second.output).has_value());
  CHECK(runner.last_step().positions == std::vector<std::int64_t>{3});
  CHECK(runner.last_attn_meta().seq_lens == Tokens{4});
  CHECK(runner.sample_tokens().sampled_token_ids[0].size() == 1);
  CHECK(runner.input_batch().num_tokens(0) == 4);
}

TEST_CASE("a row with seq_len < its known token count is a partial prefill: empty list, no growth, kept in the order") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  const Tokens prompt = prompt_of(10, 1);
  Step first(runner);
  first.admit("a", prompt, {0, 1, 2}, 5);
  first.admit("b", prompt_of(4, 2), {3}, 4);
  ModelRunnerOutput output = run_step(runner, first);
  CHECK(output.req_ids == std::vector<std::string>{"a", "b"});
  CHECK(output.sampled_token_ids == std::vector<Tokens>{{}, {dense_argmax(runner, prompt_of(4, 2))}});
  CHECK(runner.input_batch().num_tokens(0) == 10);
  CHECK(runner.input_batch().last_sampled_tokens()[0] == 0);
  Step second(runner);
  second.run("a", 5, 5);
  output = run_step(runner, second);
  CHECK(output.sampled_token_ids == std::vector<Tokens>{{dense_argmax(runner, prompt)}});
  CHECK(runner.input_batch().num_tokens(0) == 11);
}

TEST_CASE("the token is written at column (token count), the count grows by one, last_sampled_tokens is set") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step step(runner);
  step.admit("a", prompt_of(4, 1), {0}, 4);
  const std::int32_t token = run_step(runner, step).sampled_token_ids[0][0];
  CHECK(runner.input_batch().num_tokens(0) == 5);
  CHECK(runner.input_batch().token_ids(0)[4] == token);
  CHECK(runner.input_batch().last_sampled_tokens()[0] == token);
}

TEST_CASE("greedy decoding over N steps reads what the last step wrote") {
  for (const TinyModel& model : {tiny_qwen3_5(), tiny_qwen3_next(), tiny_qwen3()}) {
    CAPTURE(name(model.config.architecture));
    Engine engine(make_runner(model));
    engine.add("a", prompt_of(5, 1));
    std::int32_t last = engine.step().sampled_token_ids[0][0];
    for (int i = 0; i < 12; ++i) {
      const std::int32_t next = engine.step().sampled_token_ids[0][0];
      CHECK(engine.runner.last_step().input_token_ids == Tokens{last});
      CHECK(engine.runner.last_step().positions == std::vector<std::int64_t>{5 + i});
      last = next;
    }
    CHECK(engine.generate("a", 13) == dense_greedy(engine.runner, prompt_of(5, 1), 13));
  }
}

TEST_CASE("each row of a batch gives the argmax of a dense forward over its own tokens alone") {
  for (const TinyModel& model : {tiny_qwen3_5(), tiny_qwen3_next(), tiny_qwen3()})
    for (const int chunk : {1000, 7, 3, 1}) {
      CAPTURE(name(model.config.architecture));
      CAPTURE(chunk);
      Engine engine(make_runner(model), Engine::Output::sync, chunk);
      const int lengths[] = {1, 5, 12, 3, 8, 2};
      for (int i = 0; i < 6; ++i) engine.add(std::to_string(i), prompt_of(lengths[i], i));
      for (int i = 0; i < 6; ++i)
        CHECK(engine.generate(std::to_string(i), 6) == dense_greedy(engine.runner, prompt_of(lengths[i], i), 6));
    }
}

namespace {

// Random arrivals, ends and preemptions of three requests at most.
void check_churn(bool combine, Engine::Output output) {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.max_num_reqs = 3;
  options.async_input_combine = combine;
  Engine engine(make_runner(model, {}, options), output, 4);
  std::mt19937 rng(5);
  std::map<std::string, Tokens> live;
  int next = 0;
  for (int repeat = 0; repeat < 60; ++repeat) {
    if (live.size() < 3 && rng() % 2 == 0) {
      const std::string id = std::to_string(next++);
      live[id] = prompt_of(1 + static_cast<int>(rng() % 9), next);
      engine.add(id, live[id]);
    }
    if (!live.empty() && rng() % 5 == 0)
      engine.preempt(std::next(live.begin(), static_cast<int>(rng() % live.size()))->first);
    engine.step();
    for (auto it = live.begin(); it != live.end();) {
      if (engine.num_output(it->first) >= 5) {
        CHECK(engine.generate(it->first, 5) == dense_greedy(engine.runner, it->second, 5));
        engine.finish(it->first);
        it = live.erase(it);
      } else {
        ++it;
      }
    }
  }
  CHECK(next > 10);
}

}  // namespace

TEST_CASE("7, 8: requests that come, go and are preempted do not change each other's tokens") {
  SUBCASE("sync") { check_churn(false, Engine::Output::sync); }
  SUBCASE("async") { check_churn(true, Engine::Output::async); }
}

TEST_CASE("the tiny models do not say the same token all the time") {
  for (const TinyModel& model : {tiny_qwen3_5(), tiny_qwen3_next(), tiny_qwen3()}) {
    ModelRunner runner = make_runner(model);
    const Tokens tokens = dense_greedy(runner, prompt_of(5, 1), 12);
    CHECK(std::set(tokens.begin(), tokens.end()).size() > 3);
  }
}

TEST_CASE("D75: a block-table row holds a request of max_model_len with its drafts, in every group") {
  if (on_cuda()) return;  // it has no drafts
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.max_model_len = 30;
  options.num_speculative_tokens = 3;
  KVCacheConfig config = cache_config(model.config, {.num_speculative_tokens = 3});
  std::get<MambaSpec>(config.groups[1].spec).block_size = 8;
  const ModelRunner runner(model.config, model.tensors, config, options);
  CHECK(runner.input_batch().block_table(0).row_stride() == 9);      // ceil(33 / 4)
  CHECK(runner.input_batch().block_table(1).row_stride() == 4 + 3);  // ceil(30 / 8) + 3
}

TEST_CASE("D74: a request may fill max_model_len exactly") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.max_model_len = 16;
  ModelRunner runner = make_runner(model, {.block_size = 4, .num_blocks = 4}, options);
  const Tokens prompt = prompt_of(16, 1);
  Step step(runner);
  step.admit("a", prompt, {3, 2, 1, 0}, 16);
  CHECK(run_step(runner, step).sampled_token_ids[0] == Tokens{dense_argmax(runner, prompt)});
  Step beyond(runner);
  beyond.run("a", 16, 1);
  CHECK_THROWS_WITH_AS(runner.execute_model(beyond.output), "request a would have 17 tokens, max_model_len is 16",
                       InvalidArgument);
}

#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

ModelRunner make_async_runner(const TinyModel& model, bool combine) {
  RunnerOptions options = small_options();
  options.async_input_combine = combine;
  return make_runner(model, {}, options);
}

}  // namespace

TEST_CASE("tokens are identical in all four combinations of input combine and async output") {
  const TinyModel model = tiny_qwen3_5();
  for (const bool combine : {false, true})
    for (const auto output : {Engine::Output::sync, Engine::Output::async}) {
      CAPTURE(combine);
      CAPTURE(output == Engine::Output::async);
      Engine engine(make_async_runner(model, combine), output, 4);
      engine.add("a", prompt_of(9, 1));
      engine.add("b", prompt_of(3, 2), seeded(7, 0.8F));
      engine.add("c", prompt_of(1, 3), seeded(8, 1.5F));
      engine.generate("a", 3);
      engine.preempt("b");
      Engine reference(make_async_runner(model, false), Engine::Output::sync);
      reference.add("a", prompt_of(9, 1));
      reference.add("b", prompt_of(3, 2), seeded(7, 0.8F));
      reference.add("c", prompt_of(1, 3), seeded(8, 1.5F));
      for (const char* id : {"a", "b", "c"}) CHECK(engine.generate(id, 10) == reference.generate(id, 10));
    }
}

TEST_CASE("a scheduler that is a step ahead of the output gets the tokens of one that waits") {
  const TinyModel model = tiny_qwen3_5();
  for (const bool combine : {false, true}) {
    CAPTURE(combine);
    ModelRunner runner = make_async_runner(model, combine);
    const Tokens prompt = prompt_of(5, 1);
    const Tokens expected = dense_greedy(runner, prompt, 6);
    Step first(runner);
    first.admit("a", prompt, {0, 1, 2}, 5);
    CHECK_FALSE(runner.execute_model(first.output).has_value());
    AsyncModelRunnerOutput in_flight = runner.sample_tokens_async();
    Tokens tokens;
    for (int i = 0; i < 5; ++i) {
      // Scheduled before the output of the step before is read; the count includes the token in flight, or not.
      Step step(runner);
      step.run("a", 5 + i, 1, {}, i + (i % 2));
      CHECK_FALSE(runner.execute_model(step.output).has_value());
      tokens.push_back(in_flight.get_output().sampled_token_ids[0][0]);
      CHECK(runner.last_step().input_token_ids == Tokens{tokens.back()});
      in_flight = runner.sample_tokens_async();
    }
    tokens.push_back(in_flight.get_output().sampled_token_ids[0][0]);
    CHECK(tokens == expected);
  }
}

TEST_CASE("sample_tokens_async records last_sampled_tokens before get_output() is called, which is called once") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_async_runner(model, true);
  CHECK(ModelRunner::supports_async());
  CHECK(runner.options().async_input_combine);
  Step step(runner);
  step.admit("a", prompt_of(5, 1), {0, 1}, 5);
  CHECK_FALSE(runner.execute_model(step.output).has_value());
  AsyncModelRunnerOutput output = runner.sample_tokens_async();
  const std::int32_t recorded = runner.input_batch().last_sampled_tokens()[0];
  CHECK(output.get_output().sampled_token_ids == std::vector<Tokens>{{recorded}});
  CHECK_THROWS_WITH_AS(output.get_output(), "get_output() was called twice for one step", InvalidArgument);
}

TEST_CASE("with input combine a prefill, also the last chunk of one, reads the row's own tokens") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_async_runner(model, true);
  const Tokens prompt = prompt_of(5, 1);
  Step first(runner);
  first.admit("a", prompt, {0, 1}, 4);
  run_step(runner, first);
  Step second(runner);
  second.run("a", 4, 1);
  CHECK(run_step(runner, second).sampled_token_ids[0] == Tokens{dense_argmax(runner, prompt)});
  CHECK(runner.last_step().input_token_ids == Tokens{prompt[4]});
}

TEST_CASE("a request that ends while its next step is in flight leaves no trace") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.async_input_combine = true;
  options.max_num_reqs = 1;
  ModelRunner runner = make_runner(model, {}, options);
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  run_step(runner, first);
  Step ahead(runner);
  ahead.run("a", 3, 1);
  CHECK_FALSE(runner.execute_model(ahead.output).has_value());
  AsyncModelRunnerOutput discarded = runner.sample_tokens_async();
  Step next(runner);
  next.finish("a");
  const Tokens prompt = prompt_of(1, 9);
  next.admit("b", prompt, {0}, 1);
  CHECK_FALSE(runner.execute_model(next.output).has_value());
  discarded.get_output();
  CHECK(runner.last_step().input_token_ids == prompt);
  CHECK(runner.sample_tokens().sampled_token_ids == std::vector<Tokens>{{dense_argmax(runner, prompt)}});
}

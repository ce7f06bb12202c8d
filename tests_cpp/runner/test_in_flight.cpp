#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

ModelRunner make_combining_runner(const TinyModel& model, int max_num_reqs = 8) {
  RunnerOptions options = small_options();
  options.async_input_combine = true;
  options.max_num_reqs = max_num_reqs;
  return make_runner(model, {}, options);
}

AsyncModelRunnerOutput launch(ModelRunner& runner, const Step& step) {
  CHECK_FALSE(runner.execute_model(step.output).has_value());
  return runner.sample_tokens_async();
}

Tokens of(const ModelRunnerOutput& output, const std::string& req_id) {
  return output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at(req_id))];
}

}  // namespace

TEST_CASE("many steps in flight, read in any order or not at all, give the tokens of steps read at once [sanitizer]") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_combining_runner(model);
  const Tokens prompt_a = prompt_of(5, 1), prompt_b = prompt_of(7, 2);
  const Tokens a = dense_greedy(runner, prompt_a, 8), b = dense_greedy(runner, prompt_b, 8);
  std::vector<AsyncModelRunnerOutput> in_flight;
  Step first(runner);
  first.admit("a", prompt_a, {0, 1, 2, 3}, 5).prefill_token_ids = prompt_a;
  first.admit("b", prompt_b, {4, 5, 6, 7}, 7);
  in_flight.push_back(launch(runner, first));
  for (int i = 0; i < 7; ++i) {
    Step step(runner);
    step.run("a", 5 + i, 1).run("b", 7 + i, 1);
    in_flight.push_back(launch(runner, step));
  }
  for (const std::size_t i : {6, 0, 3, 7}) {  // the others are dropped
    const ModelRunnerOutput output = in_flight[i].get_output();
    CHECK(of(output, "a") == Tokens{a[i]});
    CHECK(of(output, "b") == Tokens{b[i]});
  }
  in_flight.clear();
  const InputBatch& batch = runner.input_batch();
  Tokens all_of_a = prompt_a, all_of_b = prompt_b;
  all_of_a.insert(all_of_a.end(), a.begin(), a.end()), all_of_b.insert(all_of_b.end(), b.begin(), b.end());
  const auto tokens = [&](const std::string& id) {
    const auto ids = batch.token_ids(batch.find(id));
    return Tokens(ids.begin(), ids.end());
  };
  CHECK(tokens("a") == all_of_a);
  CHECK(tokens("b") == all_of_b);
  CHECK(batch.last_sampled_tokens()[static_cast<std::size_t>(batch.find("a"))] == a[7]);
  const auto& inputs = runner.last_step().input_token_ids;
  CHECK(std::count(inputs.begin(), inputs.end(), a[6]) >= 1);
  CHECK(std::count(inputs.begin(), inputs.end(), b[6]) >= 1);
}

TEST_CASE("without input combine a decode of a token in flight reads it on the device") {
  const TinyModel model = tiny_qwen3_next();
  ModelRunner runner = make_runner(model);
  const Tokens prompt = prompt_of(5, 1), expected = dense_greedy(runner, prompt, 3);
  Step first(runner), second(runner), third(runner);
  first.admit("a", prompt, {0, 1}, 5);
  second.run("a", 5, 1), third.run("a", 6, 1);
  AsyncModelRunnerOutput one = launch(runner, first), two = launch(runner, second), three = launch(runner, third);
  CHECK(one.get_output().sampled_token_ids[0] == Tokens{expected[0]});
  CHECK(two.get_output().sampled_token_ids[0] == Tokens{expected[1]});
  CHECK(three.get_output().sampled_token_ids[0] == Tokens{expected[2]});
}

TEST_CASE("requests end, are preempted and come back while their tokens are in flight [sanitizer]") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_combining_runner(model, 3);
  const Tokens prompt = prompt_of(6, 3), other = prompt_of(4, 5);
  const Tokens expected = dense_greedy(runner, prompt, 6), of_other = dense_greedy(runner, other, 6);
  Step first(runner);
  first.admit("a", prompt, {0, 1, 2}, 6);
  first.admit("b", other, {3, 4, 5}, 4);
  AsyncModelRunnerOutput one = launch(runner, first);
  Step second(runner);
  second.run("a", 6, 1).run("b", 4, 1);
  AsyncModelRunnerOutput two = launch(runner, second);

  SUBCASE("preempted, and readmitted with the tokens that had been read; the token in flight is computed again") {
    CHECK(of(one.get_output(), "a") == Tokens{expected[0]});
    Step third(runner);
    third.preempt("a").run("b", 5, 1);
    Tokens known = prompt;
    known.push_back(expected[0]);
    third.admit("a", prompt, {7, 8, 9}, 7).prefill_token_ids = known;
    AsyncModelRunnerOutput three = launch(runner, third);
    CHECK(of(two.get_output(), "b") == Tokens{of_other[1]});
    const ModelRunnerOutput output = three.get_output();
    CHECK(of(output, "a") == Tokens{expected[1]});
    CHECK(of(output, "b") == Tokens{of_other[2]});
    CHECK(runner.input_batch().num_tokens(runner.input_batch().find("a")) == 8);
    Step fourth(runner);
    fourth.run("a", 7, 1).run("b", 6, 1);
    CHECK(of(launch(runner, fourth).get_output(), "a") == Tokens{expected[2]});
  }
  SUBCASE("resumed by id alone, with tokens that nobody has read") {
    Step third(runner);
    third.preempt("a").run("b", 5, 1);
    AsyncModelRunnerOutput three = launch(runner, third);
    Step fourth(runner);
    fourth.run("a", 0, 8, {7, 8, 9}, 2).run("b", 6, 1, {}, 3);
    fourth.output.scheduled_cached_reqs.resumed_req_ids = {"a"};
    const ModelRunnerOutput output = launch(runner, fourth).get_output();
    CHECK(of(output, "a") == Tokens{expected[2]});
    CHECK(of(output, "b") == Tokens{of_other[3]});
    CHECK(of(two.get_output(), "a") == Tokens{expected[1]});
    CHECK(of(three.get_output(), "b") == Tokens{of_other[2]});
  }
  SUBCASE("ended, and its id used again by another prompt: no old token gets into it") {
    Step third(runner);
    third.finish("a").run("b", 5, 1);
    third.admit("a", other, {7, 8, 9}, 4);
    AsyncModelRunnerOutput three = launch(runner, third);
    one.get_output(), two.get_output();
    CHECK(of(three.get_output(), "a") == Tokens{of_other[0]});
    const InputBatch& batch = runner.input_batch();
    const auto tokens = batch.token_ids(batch.find("a"));
    CHECK(Tokens(tokens.begin(), tokens.begin() + 4) == other);
    CHECK(tokens.size() == 5);
  }
}

TEST_CASE("an output may be read after its runner is gone") {
  const TinyModel model = tiny_qwen3_5();
  const Tokens prompt = prompt_of(5, 1);
  std::optional<ModelRunner> runner(make_combining_runner(model));
  const std::int32_t expected = dense_argmax(*runner, prompt);
  Step step(*runner);
  step.admit("a", prompt, {0, 1}, 5);
  AsyncModelRunnerOutput output = launch(*runner, step);
  runner.reset();
  CHECK(output.get_output().sampled_token_ids == std::vector<Tokens>{{expected}});
}

TEST_CASE("a request whose logits are not finite fails with its own step, whatever follows it in flight") {
  TinyModel model = tiny_qwen3_5();
  constexpr int kBad = 60;
  std::vector<float> embedding = model.values("model.embed_tokens.weight");
  embedding[kBad * 32] = std::numeric_limits<float>::quiet_NaN();
  model.set("model.embed_tokens.weight", {64, 32}, embedding);
  ModelRunner runner = make_combining_runner(model);
  const Tokens good = prompt_of(5, 1);
  const Tokens expected = dense_greedy(runner, good, 3);
  Step first(runner);
  first.admit("bad", {1, kBad, 2, 3, 4}, {0, 1, 2}, 5);
  first.admit("good", good, {3, 4, 5}, 5);
  AsyncModelRunnerOutput one = launch(runner, first);
  Step second(runner), third(runner);
  second.run("bad", 5, 1).run("good", 5, 1);
  AsyncModelRunnerOutput two = launch(runner, second);
  third.finish("bad").run("good", 6, 1);
  AsyncModelRunnerOutput three = launch(runner, third);
  int step = 0;
  for (AsyncModelRunnerOutput* pending : {&one, &two}) {
    const ModelRunnerOutput output = pending->get_output();
    CHECK(output.failed_req_ids == std::vector<std::string>{"bad"});
    CHECK(of(output, "bad").empty());
    CHECK(of(output, "good") == Tokens{expected[static_cast<std::size_t>(step++)]});
  }
  const ModelRunnerOutput output = three.get_output();
  CHECK(output.failed_req_ids.empty());
  CHECK(of(output, "good") == Tokens{expected[2]});
}

#include <doctest/doctest.h>

#include <functional>
#include <limits>

#include <deltaic/error.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

// A runner with a live request "a" that has decoded once, and what must stay as it is.
struct Fixture {
  TinyModel model = tiny_qwen3_5();
  Tokens prompt = prompt_of(5, 1);
  ModelRunner runner;

  Fixture() : runner(make(model)) {
    Step first(runner);
    first.admit("a", prompt, {0, 1, 2}, 5);
    run_step(runner, first);
  }
  static ModelRunner make(const TinyModel& model) {
    RunnerOptions options = small_options();
    options.max_num_reqs = 2;
    options.max_model_len = 16;
    options.max_num_batched_tokens = 12;
    return make_runner(model, {.num_blocks = 10, .num_snapshot_slots = 2}, options);
  }

  // The step is refused with this message, and "a" goes on as if it had never been given.
  template <class Error = InvalidArgument>
  void refuses(const std::string& message, const std::function<void(Step&)>& make_step) {
    CAPTURE(message);
    Step step(runner);
    make_step(step);
    CHECK_THROWS_WITH_AS(runner.execute_model(step.output), message.c_str(), Error);
    CHECK(runner.input_batch().req_ids() == std::vector<std::string>{"a"});
    CHECK(runner.input_batch().num_tokens(0) == 6);
    CHECK(runner.input_batch().row(0).num_computed_tokens == 0);
    CHECK(runner.input_batch().block_table(0).num_blocks(0) == 3);
    CHECK(runner.gdn_state_slots() == std::map<std::string, int>{{"a", 0}});
  }
};

}  // namespace

TEST_CASE("a step that cannot run is an InvalidArgument with names and numbers, and leaves the runner usable") {
  Fixture fixture;
  const Tokens prompt = prompt_of(3, 2);
  fixture.refuses("request b is scheduled, but the runner does not know it",
                  [](Step& step) { step.run("a", 5, 1).schedule("b", 1); });
  fixture.refuses("new request a has the id of a live one", [&](Step& step) { step.admit("a", prompt, {3}, 3); });
  fixture.refuses("request b is admitted twice in one step", [&](Step& step) {
    step.admit("b", prompt, {3}, 3);
    step.admit("b", prompt, {4}, 0);
  });
  fixture.refuses("a new request has an empty id", [&](Step& step) { step.admit("", prompt, {3}, 3); });
  fixture.refuses("request b has an empty prompt", [&](Step& step) { step.admit("b", {}, {3}, 1); });
  fixture.refuses("request b: token 1 is 64, outside the vocabulary of 64",
                  [&](Step& step) { step.admit("b", {60, 64}, {3}, 2); });
  fixture.refuses("request b: token 0 is -1, outside the vocabulary of 64",
                  [&](Step& step) { step.admit("b", {-1}, {3}, 1); });
  fixture.refuses("request b: its 2 prefill_token_ids do not begin with its 3 prompt_token_ids",
                  [&](Step& step) { step.admit("b", prompt, {3}, 2).prefill_token_ids = {1, 2}; });
  fixture.refuses("request b has 17 tokens, max_model_len is 16",
                  [&](Step& step) { step.admit("b", prompt_of(17, 1), {3, 4, 5, 6}, 12); });
  fixture.refuses("request b has 5 blocks of KV-cache group 0 (full attention), a row has 4 for max_model_len 16",
                  [&](Step& step) { step.admit("b", prompt, {3, 4, 5, 6, 7}, 3); });
  fixture.refuses("request a has 5 blocks of KV-cache group 0 (full attention), a row has 4 for max_model_len 16",
                  [&](Step& step) { step.run("a", 5, 1, {3, 4}); });
  fixture.refuses("request b has block 10 of KV-cache group 0 (full attention), which has 10 blocks",
                  [&](Step& step) { step.admit("b", prompt, {10}, 3); });
  fixture.refuses("request b has block -1 of KV-cache group 0 (full attention), which has 10 blocks",
                  [&](Step& step) { step.admit("b", prompt, {-1}, 3); });
  fixture.refuses("request b has block ids for 1 groups, the KV-cache config has 2",
                  [&](Step& step) { step.admit("b", prompt, {3}, 3).block_ids.pop_back(); });
  fixture.refuses("request b has 1 blocks of 4 tokens, too few for 5",
                  [&](Step& step) { step.admit("b", prompt_of(5, 1), {3}, 5); });
  fixture.refuses("request a is scheduled up to token 8, it has 6", [&](Step& step) { step.run("a", 5, 3); });
  fixture.refuses("request a has -1 scheduled tokens", [&](Step& step) { step.run("a", 5, -1); });
  fixture.refuses("request a has num_computed_tokens -1", [&](Step& step) { step.run("a", -1, 1); });
  fixture.refuses("request a is twice in scheduled_cached_reqs",
                  [&](Step& step) { step.run("a", 5, 1).run("a", 5, 0); });
  fixture.refuses("scheduled_cached_reqs has 1 ids and 0 num_computed_tokens",
                  [&](Step& step) { step.output.scheduled_cached_reqs.req_ids = {"a"}; });
  fixture.refuses("total_num_scheduled_tokens is 2, num_scheduled_tokens adds up to 1",
                  [&](Step& step) { step.run("a", 5, 1).output.total_num_scheduled_tokens = 2; });
  fixture.refuses("the step has 13 tokens, max_num_batched_tokens is 12", [&](Step& step) {
    step.run("a", 5, 1);
    step.admit("b", prompt_of(12, 1), {3, 4, 5}, 12);
  });
  fixture.refuses("the step makes 3 requests live, max_num_reqs is 2", [&](Step& step) {
    step.admit("b", prompt, {3}, 3);
    step.admit("c", prompt, {4}, 3);
  });
  fixture.refuses("request a has 1 draft tokens, num_speculative_tokens is 0",
                  [](Step& step) { step.run("a", 5, 1).output.scheduled_spec_decode_tokens["a"] = {3}; });
  fixture.refuses("state copy of request a: snapshot slot 1 is not in [2, 4)",
                  [](Step& step) { step.run("a", 5, 1).copy("a", StateCopyKind::snapshot, 1, 6); });
  fixture.refuses("state copy of request a: a snapshot of 5 tokens is wanted, the step ends at 6",
                  [](Step& step) { step.run("a", 5, 1).copy("a", StateCopyKind::snapshot, 2, 5); });
  fixture.refuses("state copy of request a, which does not run in this step",
                  [](Step& step) { step.run("a", 5, 0).copy("a", StateCopyKind::snapshot, 2, 5); });
  fixture.refuses("state copy of request b: snapshot slot 2 holds nothing, wanted is the state after 2",
                  [&](Step& step) {
                    step.admit("b", prompt, {3}, 1, greedy(), 2);
                    step.copy("b", StateCopyKind::hit, 2, 2);
                  });
  fixture.refuses("state copy of request b: the snapshot is of 4 tokens, the request has computed 2", [&](Step& step) {
    step.admit("b", prompt, {3}, 1, greedy(), 2);
    step.copy("b", StateCopyKind::hit, 2, 4);
  });

  const Tokens expected = dense_greedy(fixture.runner, fixture.prompt, 2);
  Step next(fixture.runner);
  next.run("a", 5, 1);
  CHECK(run_step(fixture.runner, next).sampled_token_ids[0] == Tokens{expected[1]});
}

TEST_CASE("sampling parameters that are out of range are refused at admission, naming the field") {
  Fixture fixture;
  const auto refuse = [&](const std::string& field, const std::function<void(SamplingParams&)>& change) {
    CAPTURE(field);
    Step step(fixture.runner);
    change(step.admit("b", prompt_of(3, 2), {3}, 3).sampling_params);
    try {
      fixture.runner.execute_model(step.output);
      FAIL_CHECK("not refused");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find(field) != std::string::npos);
    }
    CHECK(fixture.runner.input_batch().num_reqs() == 1);
  };
  refuse("temperature", [](auto& params) { params.temperature = std::numeric_limits<float>::quiet_NaN(); });
  refuse("top_p", [](auto& params) { params.top_p = 1.5F; });
  refuse("logit_bias", [](auto& params) { params.logit_bias[64] = 1.0F; });
}

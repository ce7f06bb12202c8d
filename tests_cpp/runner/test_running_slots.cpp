#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

using Slots = std::map<std::string, int>;

}  // namespace

TEST_CASE("slots are keyed on the request id, never on a block id: two requests in mamba block 0 have two slots") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step step(runner);
  step.admit("a", prompt_of(5, 1), {0, 1}, 5).block_ids[1] = {0};
  step.admit("b", prompt_of(6, 2), {2, 3}, 6).block_ids[1] = {0};
  const ModelRunnerOutput output = run_step(runner, step);
  CHECK(runner.gdn_state_slots() == Slots{{"a", 0}, {"b", 1}});
  CHECK(runner.last_gdn_meta().state_indices == Tokens{0, 1});
  CHECK(output.sampled_token_ids ==
        std::vector<Tokens>{{dense_argmax(runner, prompt_of(5, 1))}, {dense_argmax(runner, prompt_of(6, 2))}});
}

TEST_CASE("slots are handed out in the row order after the reorder") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step step(runner);
  step.admit("P0", prompt_of(5, 1), {0, 1}, 5);
  step.admit("P1", prompt_of(5, 2), {2, 3}, 5);
  NewRequestData& decode = step.admit("D", prompt_of(3, 3), {4}, 1, greedy(), 3);
  decode.prefill_token_ids = decode.prompt_token_ids;
  decode.prefill_token_ids.push_back(1);
  CHECK_FALSE(runner.execute_model(step.output).has_value());
  CHECK(runner.input_batch().req_ids() == std::vector<std::string>{"D", "P1", "P0"});
  CHECK(runner.gdn_state_slots() == Slots{{"D", 0}, {"P1", 1}, {"P0", 2}});
}

TEST_CASE("slots are reclaimed at the start of the next step that schedules tokens, and reused in that same step") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  first.admit("b", prompt_of(3, 2), {1}, 3);
  run_step(runner, first);
  Step empty(runner);
  empty.finish("a");
  run_step(runner, empty);
  CHECK(runner.gdn_state_slots() == Slots{{"a", 0}, {"b", 1}});
  Step next(runner);
  next.run("b", 3, 1);
  next.admit("c", prompt_of(5, 3), {2, 3}, 5);
  const ModelRunnerOutput output = run_step(runner, next);
  // A continuing request keeps its slot.
  CHECK(runner.gdn_state_slots() == Slots{{"b", 1}, {"c", 0}});
  CHECK(output.sampled_token_ids[1] == Tokens{dense_argmax(runner, prompt_of(5, 3))});
  Step last(runner);
  last.preempt("b").run("c", 5, 1);
  last.admit("d", prompt_of(2, 4), {1}, 2);
  CHECK(run_step(runner, last).req_ids == std::vector<std::string>{"c", "d"});
  CHECK(runner.gdn_state_slots() == Slots{{"c", 0}, {"d", 1}});
}

TEST_CASE("5, 6: a fresh prompt of one token never inherits what the slot's former owner left (D48, D49)") {
  const TinyModel model = tiny_qwen3_5();
  for (const bool combine : {false, true}) {
    CAPTURE(combine);
    RunnerOptions options = small_options();
    options.max_num_reqs = 1;
    options.async_input_combine = combine;
    Engine engine(make_runner(model, {}, options));
    for (int i = 0; i < 4; ++i) {
      CAPTURE(i);
      const std::string id = std::to_string(i);
      const Tokens prompt = prompt_of(1 + i % 2 * 4, 10 + i);
      engine.add(id, prompt);
      CHECK(engine.step().sampled_token_ids[0] == Tokens{dense_argmax(engine.runner, prompt)});
      CHECK(engine.runner.last_gdn_meta().num_prefills == 1);
      CHECK(engine.runner.last_gdn_meta().has_initial_state == std::vector<bool>{false});
      CHECK(engine.runner.gdn_state_slots() == Slots{{id, 0}});
      // The first decode reads the request's own token.
      const Tokens expected = dense_greedy(engine.runner, prompt, 4);
      engine.step();
      CHECK(engine.runner.last_step().input_token_ids == Tokens{expected[0]});
      CHECK(engine.generate(id, 4) == expected);
      engine.finish(id);
    }
  }
}

TEST_CASE("two live sequences longer than a mamba block keep two slots and their own states") {
  const TinyModel model = tiny_qwen3_5();
  KVCacheConfig config = cache_config(model.config);
  std::get<MambaSpec>(config.groups[1].spec).block_size = 4;
  Engine engine(ModelRunner(model.config, model.tensors, config, small_options()));
  engine.add("a", prompt_of(9, 1)), engine.add("b", prompt_of(11, 2));
  CHECK(engine.generate("a", 10) == dense_greedy(engine.runner, prompt_of(9, 1), 10));
  CHECK(engine.generate("b", 10) == dense_greedy(engine.runner, prompt_of(11, 2), 10));
  CHECK(engine.runner.gdn_state_slots() == Slots{{"a", 0}, {"b", 1}});
}

TEST_CASE("more live sequences than slots: a clear error that names both numbers, and the others go on") {
  const TinyModel model = tiny_qwen3_5();
  KVCacheConfig config = cache_config(model.config);
  config.num_running_slots = 2;
  ModelRunner runner(model.config, model.tensors, config, small_options());
  Step first(runner);
  first.admit("a", prompt_of(3, 1), {0}, 3);
  first.admit("b", prompt_of(3, 2), {1}, 3);
  run_step(runner, first);
  Step third(runner);
  third.run("a", 3, 1).run("b", 3, 1);
  third.admit("c", prompt_of(3, 3), {2}, 3);
  CHECK_THROWS_WITH_AS(runner.execute_model(third.output), "the step has 3 live sequences, there are state slots for 2",
                       InvalidArgument);
  CHECK(runner.input_batch().num_reqs() == 2);
  // A slot that comes free in the step can be had.
  third.output.scheduled_cached_reqs = {};
  third.output.num_scheduled_tokens.erase("a");
  third.output.num_scheduled_tokens.erase("b");
  third.output.total_num_scheduled_tokens = 3;
  third.finish("a");
  CHECK(run_step(runner, third).sampled_token_ids[0] == Tokens{dense_argmax(runner, prompt_of(3, 3))});
}

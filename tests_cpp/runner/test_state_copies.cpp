#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

std::vector<float> slot_bytes(const TensorView& view, int slot) { return host_row<float>(view, slot); }

}  // namespace

TEST_CASE(
    "a snapshot is taken after the forward, and a hit put back before it: the tokens are those of a full prefill") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model, {.num_snapshot_slots = 3});
  const int first_snapshot = 8;
  CHECK(runner.num_state_slots() == 11);
  const Tokens shared = prompt_of(8, 1);
  Tokens prompt_a = shared, prompt_b = shared;
  for (const int token : {5, 6, 7}) prompt_a.push_back(token);
  for (const int token : {30, 31}) prompt_b.push_back(token);

  Step first(runner);
  first.admit("a", prompt_a, {0, 1, 2}, 8);
  first.copy("a", StateCopyKind::snapshot, first_snapshot + 1, 8);
  run_step(runner, first);
  for (const auto& state : runner.gdn_state()) {
    CHECK(slot_bytes(state.conv, first_snapshot + 1) == slot_bytes(state.conv, 0));
    CHECK(slot_bytes(state.temporal, first_snapshot + 1) == slot_bytes(state.temporal, 0));
  }

  // b shares a's first two blocks; its own token goes into a block of its own.
  Step second(runner);
  second.run("a", 8, 3);
  second.admit("b", prompt_b, {0, 1, 5}, 2, greedy(), 8);
  second.copy("b", StateCopyKind::hit, first_snapshot + 1, 8);
  ModelRunnerOutput output = run_step(runner, second);
  const auto of = [&](const std::string& id) {
    return output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at(id))];
  };
  CHECK(of("a") == Tokens{dense_argmax(runner, prompt_a)});
  CHECK(of("b") == Tokens{dense_argmax(runner, prompt_b)});

  SUBCASE("the snapshot stays as it was: a third request hits it too, and continues past it") {
    Step third(runner);
    third.finish("a").run("b", 10, 1);
    third.admit("c", prompt_a, {0, 1, 6}, 3, greedy(), 8);
    third.copy("c", StateCopyKind::hit, first_snapshot + 1, 8);
    output = run_step(runner, third);
    CHECK(of("c") == Tokens{dense_argmax(runner, prompt_a)});
    CHECK(of("b") == Tokens{dense_greedy(runner, prompt_b, 2)[1]});
  }
  SUBCASE("a slot that holds the state after another number of tokens is refused") {
    Step third(runner);
    third.admit("c", prompt_a, {0, 6, 7}, 7, greedy(), 4);
    third.copy("c", StateCopyKind::hit, first_snapshot + 1, 4);
    CHECK_THROWS_WITH_AS(
        runner.execute_model(third.output),
        "state copy of request c: snapshot slot 9 holds the state after another number of tokens than 4",
        InvalidArgument);
  }
}

TEST_CASE("a preempted request comes back with a hit on its own snapshot") {
  const TinyModel model = tiny_qwen3_next();
  ModelRunner runner = make_runner(model, {.num_snapshot_slots = 1});
  const Tokens prompt = prompt_of(6, 4);
  const Tokens expected = dense_greedy(runner, prompt, 4);
  Step first(runner);
  first.admit("a", prompt, {0, 1, 2}, 4);
  first.copy("a", StateCopyKind::snapshot, 8, 4);
  run_step(runner, first);
  Step second(runner);
  second.run("a", 4, 2);
  CHECK(run_step(runner, second).sampled_token_ids[0] == Tokens{expected[0]});
  Step away(runner);
  away.preempt("a");
  away.admit("b", prompt_of(3, 2), {5}, 3);
  run_step(runner, away);
  Step back(runner);
  back.finish("b");
  NewRequestData& request = back.admit("a", prompt, {0, 7}, 3, greedy(), 4);
  request.prefill_token_ids = prompt;
  request.prefill_token_ids.push_back(expected[0]);
  back.copy("a", StateCopyKind::hit, 8, 4);
  CHECK(run_step(runner, back).sampled_token_ids[0] == Tokens{expected[1]});
  Step last(runner);
  last.run("a", 7, 1);
  CHECK(run_step(runner, last).sampled_token_ids[0] == Tokens{expected[2]});
}

#include <doctest/doctest.h>

#include "tests_cpp/runner/async_drafts.h"
#include "tests_cpp/runner/request_names.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

// With the draft module, all kinds of layers.
const TinyModel& model_of(Architecture architecture) {
  static const std::map<Architecture, TinyModel> models = [] {
    std::map<Architecture, TinyModel> made;
    for (const Architecture each : {Architecture::qwen3, Architecture::qwen3_5, Architecture::qwen3_next})
      made.emplace(each, make_tiny_model(each, {.mtp = true}));
    return made;
  }();
  return models.at(architecture);
}

ModelRunner make_drafting_runner(const TinyModel& model, bool enforce_eager = false, int max_model_len = 64) {
  RunnerOptions options = draft_options(max_model_len);
  options.async_input_combine = true;
  options.enforce_eager = enforce_eager;
  return ModelRunner(model.config, model.tensors, draft_caches(model, {.num_blocks = 200}, /*makes_drafts=*/true),
                     options);
}
ModelRunner make_plain_runner(const TinyModel& model) {
  RunnerOptions options = small_options();
  options.max_num_batched_tokens = 512;
  return make_runner(model, {.num_blocks = 200}, options);
}

SamplingParams params_of(int kind) {
  SamplingParams params = kind % 3 == 0 ? greedy() : seeded(100 + kind, 0.9F);
  if (kind % 4 == 1) params.presence_penalty = 0.6F, params.repetition_penalty = 1.3F, params.frequency_penalty = 0.3F;
  if (kind % 4 == 2) params.top_k = 12, params.bad_words = {{3}, {7, 9}, {1, 2, 5}};
  if (kind % 4 == 3) params.top_p = 0.9F, params.logit_bias = {{4, 2.0F}, {11, -3.0F}};
  if (kind % 5 == 2) params.min_tokens = 9, params.stop_token_ids = {1, 2, 3, 5, 8};
  return params;
}

}  // namespace

TEST_CASE(
    "tokens with drafts are those without, however far the host is behind; prefills join and requests come back") {
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_5, Architecture::qwen3_next})
    for (const bool enforce_eager : {false, true})
      for (const int depth : {0, 1, 2}) {
        CAPTURE(name(architecture));
        CAPTURE(enforce_eager);
        CAPTURE(depth);
        const TinyModel& model = model_of(architecture);
        std::map<std::string, Tokens> expected;
        Engine plain(make_plain_runner(model));
        for (int i = 0; i < 6; ++i) plain.add(numbered("r", i), prompt_of(3 + 4 * i, i), params_of(i));
        for (int i = 0; i < 6; ++i) expected[numbered("r", i)] = plain.generate(numbered("r", i), 24);

        AsyncDraftEngine engine(make_drafting_runner(model, enforce_eager), depth, kDrafts);
        for (int i = 0; i < 3; ++i) engine.add(numbered("r", i), prompt_of(3 + 4 * i, i), params_of(i));
        for (int step = 0; step < 16; ++step) {
          if (step >= 3 && step < 6) engine.add(numbered("r", step), prompt_of(3 + 4 * step, step), params_of(step));
          if (step == 7) engine.preempt("r1"), engine.preempt("r4");
          engine.step(7);
          for (const auto& [req_id, request] : std::map(engine.requests))
            if (request.tokens.size() + static_cast<std::size_t>(request.num_placeholders) > 45) engine.finish(req_id);
        }
        engine.read_all();
        for (const auto& [req_id, request] : engine.requests) {
          const Tokens output = request.output();
          CAPTURE(req_id);
          REQUIRE(output.size() >= 6);
          const auto count = static_cast<std::ptrdiff_t>(std::min<std::size_t>(output.size(), 24));
          CHECK(Tokens(output.begin(), output.begin() + count) ==
                Tokens(expected[req_id].begin(), expected[req_id].begin() + count));
        }
        CHECK(engine.num_made > 50);
        CHECK(engine.num_accepted > 0);
      }
}

TEST_CASE("where a step begins, and what it accepted before, follows from what was accepted, not from what was hoped") {
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_5}) {
    const TinyModel& model = model_of(architecture);
    RunnerOptions options = draft_options();
    options.async_input_combine = true;
    for (const auto& script : std::vector<std::vector<int>>{{0, 0, 0, 0}, {3, 3, 3, 3}, {1, 0, 2, 3}, {2, 1, 3, 0}}) {
      ModelRunner runner(model.config, model.tensors, draft_caches(model), options);
      const Tokens prompt = prompt_of(5, 1), right = dense_greedy(runner, prompt, 30);
      Step prefill(runner);
      prefill.admit("a", prompt, {1, 2, 3, 4, 5, 6, 7, 8, 9}, 5);
      run_step(runner, prefill);
      std::vector<AsyncModelRunnerOutput> outputs;
      int num_output = 1, hoped = 5;
      for (const int num_right : script) {
        Step step(runner);
        step.run("a", hoped, 1 + kDrafts, {}, hoped - 5 + 1);
        Tokens drafts;
        for (int j = 0; j < kDrafts; ++j) {
          const std::int32_t token = right[static_cast<std::size_t>(num_output + j)];
          drafts.push_back(j < num_right ? token : (token + 1) % 64);
        }
        step.output.scheduled_spec_decode_tokens["a"] = drafts;
        CHECK_FALSE(runner.execute_model(step.output).has_value());
        outputs.push_back(runner.sample_tokens_async());
        hoped += 1 + kDrafts, num_output += 1 + num_right;
      }
      int next = 1;
      for (std::size_t i = 0; i < script.size(); ++i) {
        const Tokens sampled = outputs[i].get_output().sampled_token_ids[0];
        CHECK(sampled == Tokens(right.begin() + next, right.begin() + next + script[i] + 1));
        next += script[i] + 1;
      }
      const int begin = 5 + next - 1 - (script.back() + 1);
      CHECK(runner.last_step().positions[0] == begin);
      CHECK(runner.last_attn_meta().seq_lens[0] == begin + 1 + kDrafts);
      if (runner.gdn_group_id() >= 0)
        CHECK(runner.last_gdn_meta().num_accepted_tokens[0] == script[script.size() - 2] + 1);
      CHECK(runner.input_batch().num_tokens(0) == 5 + next);
    }
  }
}

TEST_CASE("D47: ahead of the output, a request that joins starts from an accepted count of one") {
  const TinyModel& model = model_of(Architecture::qwen3_5);
  RunnerOptions options = draft_options();
  options.async_input_combine = true;
  for (const bool takes_a_row : {false, true}) {
    CAPTURE(takes_a_row);
    ModelRunner runner(model.config, model.tensors, draft_caches(model, {.num_blocks = 60}), options);
    std::map<std::string, Tokens> right;
    std::vector<AsyncModelRunnerOutput> outputs;
    const auto admit = [&](Step& step, const std::string& req_id, int number) {
      std::vector<int> blocks;
      for (int i = 0; i < 8; ++i) blocks.push_back(1 + 8 * number + i);
      step.admit(req_id, prompt_of(5, number), blocks, 5);
      right[req_id] = dense_greedy(runner, prompt_of(5, number), 20);
    };
    // A verified step behind so many tokens of output, whose drafts are all right.
    const auto verify = [&](Step& step, const std::string& req_id, int num_output) {
      const auto first = right[req_id].begin() + num_output;
      step.run(req_id, 5 + num_output - 1, 1 + kDrafts, {}, num_output);
      step.output.scheduled_spec_decode_tokens[req_id] = Tokens(first, first + kDrafts);
    };
    const auto enqueue = [&](const Step& step) {
      CHECK_FALSE(runner.execute_model(step.output).has_value());
      outputs.push_back(runner.sample_tokens_async());
    };
    const auto find = [&](const std::string& req_id) {
      return static_cast<std::size_t>(runner.input_batch().find(req_id));
    };
    Step first(runner);
    for (int i = 0; i < 3; ++i) admit(first, numbered("old", i), i);
    enqueue(first);
    Step second(runner);
    for (int i = 0; i < 3; ++i) verify(second, numbered("old", i), 1);
    enqueue(second);
    const int num_gone = takes_a_row ? 1 : 0;
    Step third(runner);
    if (takes_a_row) third.finish(numbered("old", 0));
    for (int i = num_gone; i < 3; ++i) verify(third, numbered("old", i), 5);
    admit(third, "new", 3);
    enqueue(third);
    Step fourth(runner);
    for (int i = num_gone; i < 3; ++i) verify(fourth, numbered("old", i), 9);
    verify(fourth, "new", 1);
    enqueue(fourth);
    const auto& num_accepted = runner.last_gdn_meta().num_accepted_tokens;
    CHECK(num_accepted[find("new")] == 1);
    for (int i = num_gone; i < 3; ++i) CHECK(num_accepted[find(numbered("old", i))] == 1 + kDrafts);
    ModelRunnerOutput last;
    for (AsyncModelRunnerOutput& output : outputs) last = output.get_output();
    const auto sampled = last.sampled_token_ids[static_cast<std::size_t>(last.req_id_to_index.at("new"))];
    CHECK(sampled == Tokens(right["new"].begin() + 1, right["new"].begin() + 5));
  }
}

TEST_CASE(
    "D50: a prompt in parts beside drafts: the module reads valid tokens, and its drafts are those of a dense chain") {
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_5}) {
    const TinyModel& model = model_of(architecture);
    AsyncDraftEngine engine(make_drafting_runner(model), 1, kDrafts);
    engine.add("a", prompt_of(4, 1));
    engine.step();
    engine.step();
    engine.add("b", prompt_of(23, 2));
    for (int i = 0; i < 4; ++i) engine.step(6);  // b samples in the fourth
    engine.read_all();
    const Tokens& tokens = engine.requests["b"].tokens;
    REQUIRE(tokens.size() == 24);
    const auto expected =
        engine.runner.dense_draft(std::span(tokens).first(tokens.size() - 1), tokens.back(), kDrafts).token_ids;
    engine.step();
    const auto inputs = engine.runner.last_step();
    const int row = engine.runner.input_batch().find("b");
    const auto first = inputs.input_token_ids.begin() + inputs.query_start_loc[static_cast<std::size_t>(row)];
    CHECK(*first == tokens.back());
    CHECK(Tokens(first + 1, first + 1 + kDrafts) == expected);
  }
}

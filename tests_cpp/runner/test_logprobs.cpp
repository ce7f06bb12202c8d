#include <doctest/doctest.h>

#include <cmath>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

// log softmax of row `position` of a dense forward, at `token`.
float dense_logprob(const DenseForwardOutput& dense, int vocab_size, int position, std::int32_t token) {
  const float* row = dense.logits.data() + static_cast<std::ptrdiff_t>(position) * vocab_size;
  double sum = 0.0;
  for (int i = 0; i < vocab_size; ++i) sum += std::exp(static_cast<double>(row[i]));
  return static_cast<float>(static_cast<double>(row[token]) - std::log(sum));
}

}  // namespace

TEST_CASE("D89: prompt_logprobs of all chunks of a prompt together are one entry a prompt token but the first") {
  const TinyModel model = tiny_qwen3_5();
  const Tokens prompt = prompt_of(13, 1);
  for (const int chunk : {1000, 5, 4, 1}) {
    CAPTURE(chunk);
    RunnerOptions options = small_options();
    options.max_num_reqs = 3;  // fewer rows of logits than prompt positions
    Engine engine(make_runner(model, {}, options), Engine::Output::sync, chunk);
    const DenseForwardOutput dense = engine.runner.dense_forward(prompt);
    SamplingParams params = greedy();
    params.prompt_logprobs = 2;
    engine.add("plain", prompt_of(6, 2));
    engine.add("a", prompt, params);
    std::vector<TokenLogprobs> entries;
    while (engine.num_output("a") < 3) {
      const ModelRunnerOutput output = engine.step();
      CHECK_FALSE(output.prompt_logprobs.contains("plain"));
      if (const auto found = output.prompt_logprobs.find("a"); found != output.prompt_logprobs.end())
        entries.insert(entries.end(), found->second.begin(), found->second.end());
    }
    REQUIRE(entries.size() == prompt.size() - 1);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      CHECK(entries[i].token_ids.size() == 3);
      CHECK(entries[i].token_ids[0] == prompt[i + 1]);
      CHECK(entries[i].logprobs[0] ==
            doctest::Approx(dense_logprob(dense, model.config.vocab_size, static_cast<int>(i), prompt[i + 1]))
                .epsilon(1e-4));
      CHECK(entries[i].rank >= 1);
    }
  }
}

TEST_CASE("D89: a preemption between two chunks gives each prompt position again, from the first") {
  const TinyModel model = tiny_qwen3_5();
  const Tokens prompt = prompt_of(9, 1);
  Engine engine(make_runner(model), Engine::Output::sync, 4);
  SamplingParams params = greedy();
  params.prompt_logprobs = 0;
  engine.add("a", prompt, params);
  CHECK(engine.step().prompt_logprobs.at("a").size() == 4);
  CHECK(engine.step().prompt_logprobs.at("a").size() == 4);
  engine.preempt("a");
  CHECK(engine.step().prompt_logprobs.at("a")[0].token_ids == Tokens{prompt[1]});
  CHECK(engine.step().prompt_logprobs.at("a").size() == 4);
  CHECK(engine.step().prompt_logprobs.empty());
  // Output tokens that are computed again are no prompt.
  engine.generate("a", 4);
  engine.preempt("a");
  std::size_t count = 0;
  while (engine.num_output("a") < 5)
    if (const auto output = engine.step(); output.prompt_logprobs.contains("a"))
      count += output.prompt_logprobs.at("a").size();
  CHECK(count == prompt.size() - 1);
}

TEST_CASE("logprobs are given where asked for: one entry a sampled token, none for a partial prefill") {
  const TinyModel model = tiny_qwen3_5();
  Engine engine(make_runner(model), Engine::Output::sync, 4);
  const Tokens prompt = prompt_of(7, 1);
  SamplingParams params = greedy();
  params.logprobs = 2;
  engine.add("a", prompt, params);
  engine.add("b", prompt_of(3, 2));
  CHECK(engine.step().logprobs.empty());
  const ModelRunnerOutput output = engine.step();
  REQUIRE(output.logprobs.size() == 1);
  REQUIRE(output.logprobs.at("a").size() == 1);
  const TokenLogprobs& entry = output.logprobs.at("a")[0];
  const auto token = output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at("a"))][0];
  CHECK(entry.token_ids.size() == 3);
  CHECK(entry.token_ids[0] == token);
  CHECK(entry.token_ids[1] == token);
  CHECK(entry.rank == 1);
  const DenseForwardOutput dense = engine.runner.dense_forward(prompt);
  CHECK(entry.logprobs[0] == doctest::Approx(dense_logprob(dense, model.config.vocab_size, 6, token)).epsilon(1e-4));
}

TEST_CASE("D56: prompt positions without finite logits fail their request and no other") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model);
  SamplingParams params = greedy();
  params.prompt_logprobs = 1;
  Step step(runner);
  step.admit("bad", prompt_of(8, 1), {0, 1}, 4, params, 4);  // four computed tokens that are NaN in the caches
  step.admit("good", prompt_of(8, 1), {2, 3}, 8, params);
  const ModelRunnerOutput output = run_step(runner, step);
  CHECK(output.failed_req_ids == std::vector<std::string>{"bad"});
  CHECK(output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at("bad"))].empty());
  CHECK(output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at("good"))].size() == 1);
  CHECK(output.prompt_logprobs.at("good").size() == 7);
}

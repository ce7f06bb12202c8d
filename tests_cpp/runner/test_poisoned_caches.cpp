#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

template <class T>
T first_of(const TensorView& view) {
  return host_row<T>(view, 0)[0];
}

}  // namespace

TEST_CASE("D61: caches filled with NaN change nothing, at lengths just above a block boundary") {
  for (const TinyModel& model : {tiny_qwen3_5(), tiny_qwen3_next(), tiny_qwen3()})
    for (const int length : {1, 4, 5, 8, 9, 12, 13}) {
      CAPTURE(name(model.config.architecture));
      CAPTURE(length);
      Engine engine(make_runner(model));
      CHECK(std::isnan(first_of<float>(engine.runner.attn_kv()[0].k)));
      CHECK(std::isnan(first_of<float>(engine.runner.attn_kv()[0].v)));
      for (const auto& state : engine.runner.gdn_state()) {
        CHECK(std::isnan(first_of<float>(state.conv)));
        CHECK(std::isnan(first_of<float>(state.temporal)));
      }
      engine.add("a", prompt_of(length, 1));
      CHECK(engine.generate("a", 5) == dense_greedy(engine.runner, prompt_of(length, 1), 5));
    }
}

TEST_CASE("D61: 16-bit caches are poisoned too") {
  const TinyModel model = tiny_qwen3_5();
  const ModelRunner runner =
      make_runner(model, {.kv_dtype = DType::f16, .conv_dtype = DType::bf16, .temporal_dtype = DType::f16});
  // All exponent bits and at least one more.
  const auto is_nan = [](std::uint16_t bits, int quiet_nan) { return (bits & quiet_nan) == quiet_nan; };
  CHECK(is_nan(first_of<std::uint16_t>(runner.attn_kv()[0].k), 0x7E00));
  CHECK(is_nan(first_of<std::uint16_t>(runner.gdn_state()[0].conv), 0x7FC0));
  CHECK(is_nan(first_of<std::uint16_t>(runner.gdn_state()[0].temporal), 0x7E00));
}

TEST_CASE("D61: without poison the caches start at zero") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.poison_caches = false;
  const ModelRunner runner = make_runner(model, {}, options);
  CHECK(host_row<float>(runner.attn_kv()[0].v, 0)[5] == 0.0F);
  CHECK(host_row<float>(runner.gdn_state()[1].temporal, 0)[5] == 0.0F);
}

TEST_CASE(
    "a request whose logits are not finite fails alone, and what it leaves in blocks and slot harms nobody (D61)") {
  TinyModel model = tiny_qwen3_5();
  constexpr int kBad = 60;
  std::vector<float> embedding = model.values("model.embed_tokens.weight");
  embedding[kBad * 32] = std::numeric_limits<float>::quiet_NaN();
  model.set("model.embed_tokens.weight", {64, 32}, embedding);
  RunnerOptions options = small_options();
  options.max_num_reqs = 2;
  ModelRunner runner = make_runner(model, {.num_blocks = 8}, options);
  const Tokens good = prompt_of(5, 1);
  REQUIRE(std::find(good.begin(), good.end(), kBad) == good.end());
  Step first(runner);
  first.admit("bad", {1, kBad, 2, 3, 4}, {0, 1}, 5);
  first.admit("good", good, {2, 3}, 5);
  ModelRunnerOutput output = run_step(runner, first);
  CHECK(output.failed_req_ids == std::vector<std::string>{"bad"});
  CHECK(output.req_ids == std::vector<std::string>{"bad", "good"});
  CHECK(output.sampled_token_ids == std::vector<Tokens>{{}, {dense_argmax(runner, good)}});
  CHECK(runner.input_batch().num_tokens(0) == 5);

  // Its next step may be on its way already.
  Step ahead(runner);
  ahead.run("bad", 5, 1).run("good", 5, 1);
  output = run_step(runner, ahead);
  CHECK(output.failed_req_ids == std::vector<std::string>{"bad"});

  const Tokens next = prompt_of(6, 3);
  Step second(runner);
  second.finish("bad").run("good", 6, 1);
  second.admit("next", next, {0, 1}, 6);
  output = run_step(runner, second);
  CHECK(output.failed_req_ids.empty());
  CHECK(runner.gdn_state_slots().at("next") == 0);
  CHECK(output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at("next"))] ==
        Tokens{dense_argmax(runner, next)});
  CHECK(output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at("good"))] ==
        Tokens{dense_greedy(runner, good, 3)[2]});
}

TEST_CASE("D65: nothing at start-up or in a step writes a block or a slot that nobody owns") {
  const TinyModel model = tiny_qwen3_5();
  for (const bool poison : {false, true}) {
    CAPTURE(poison);
    RunnerOptions options = small_options();
    options.poison_caches = poison;
    Engine engine(make_runner(model, {}, options));
    const auto& kv = engine.runner.attn_kv()[0];
    const auto& state = engine.runner.gdn_state()[0];
    const auto bytes = [](const TensorView& view, std::int64_t row) {
      const std::vector<float> values = host_row<float>(view, row, view.numel() / view.shape[0]);
      const auto* begin = reinterpret_cast<const unsigned char*>(values.data());
      return std::vector<unsigned char>(begin, begin + values.size() * sizeof(float));
    };
    const std::int64_t last_block = kv.k.shape[0] - 1, last_slot = state.temporal.shape[0] - 1;
    const auto k = bytes(kv.k, last_block), v = bytes(kv.v, last_block);
    const auto conv = bytes(state.conv, last_slot), temporal = bytes(state.temporal, last_slot);
    CHECK(std::isnan(first_of<float>(kv.k)) == poison);
    engine.add("a", prompt_of(9, 1));
    CHECK(engine.generate("a", 5) == dense_greedy(engine.runner, prompt_of(9, 1), 5));
    CHECK(bytes(kv.k, last_block) == k);
    CHECK(bytes(kv.v, last_block) == v);
    CHECK(bytes(state.conv, last_slot) == conv);
    CHECK(bytes(state.temporal, last_slot) == temporal);
  }
}

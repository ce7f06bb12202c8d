#include <doctest/doctest.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

SamplingParams unseeded() {
  SamplingParams params;
  params.temperature = 1.0F;
  return params;
}

Tokens alone(const TinyModel& model, const Tokens& prompt, const SamplingParams& params, int count) {
  Engine engine(make_runner(model));
  engine.add("alone", prompt, params);
  return engine.generate("alone", count);
}

}  // namespace

TEST_CASE("D81: a seeded request alone, with 7 unseeded companions and after others have ended gives the same tokens") {
  const TinyModel model = tiny_qwen3_5();
  const Tokens prompt = prompt_of(5, 1);
  const Tokens expected = alone(model, prompt, seeded(42), 12);
  SUBCASE("with 7 unseeded companions") {
    Engine engine(make_runner(model));
    for (int i = 0; i < 7; ++i) engine.add(std::to_string(i), prompt_of(2 + i, 20 + i), unseeded());
    engine.add("s", prompt, seeded(42));
    CHECK(engine.generate("s", 12) == expected);
  }
  SUBCASE("on another row, after others have ended") {
    Engine engine(make_runner(model));
    for (int i = 0; i < 4; ++i) engine.add(std::to_string(i), prompt_of(2 + i, 20 + i), unseeded());
    engine.step();
    engine.add("s", prompt, seeded(42));
    engine.generate("s", 3);
    for (int i = 0; i < 4; ++i) engine.finish(std::to_string(i));
    CHECK(engine.generate("s", 12) == expected);
  }
  SUBCASE("in chunks, with a preemption, with async output") {
    Engine engine(make_runner(model), Engine::Output::async, 2);
    engine.add("g", prompt_of(3, 2));
    engine.add("s", prompt, seeded(42));
    engine.generate("s", 5);
    engine.preempt("s");
    CHECK(engine.generate("s", 12) == expected);
  }
}

TEST_CASE("two unseeded runs differ, and so do two seeds; the same seed does not") {
  const TinyModel model = tiny_qwen3_5();
  const Tokens prompt = prompt_of(5, 1);
  CHECK(alone(model, prompt, unseeded(), 20) != alone(model, prompt, unseeded(), 20));
  CHECK(alone(model, prompt, seeded(1), 20) != alone(model, prompt, seeded(2), 20));
  CHECK(alone(model, prompt, seeded(1), 20) == alone(model, prompt, seeded(1), 20));
}

TEST_CASE("fresh entropy is drawn once for a request: it keeps its seed over a preemption") {
  const TinyModel model = tiny_qwen3_5();
  Engine engine(make_runner(model));
  engine.add("a", prompt_of(3, 1), unseeded());
  engine.step();
  const std::uint64_t seed = engine.runner.input_batch().row(0).seed;
  engine.preempt("a");
  engine.step();
  CHECK(engine.runner.input_batch().row(0).seed == seed);
  CHECK(engine.runner.input_batch().make_sampling_metadata(64).generators.empty());
  engine.finish("a");
  engine.add("a", prompt_of(3, 1), unseeded());
  engine.step();
  CHECK(engine.runner.input_batch().row(0).seed != seed);
}

TEST_CASE("temperature 0 is greedy; all_greedy is false if any row samples") {
  const TinyModel model = tiny_qwen3_5();
  Engine engine(make_runner(model));
  engine.add("g", prompt_of(3, 1));
  engine.step();
  CHECK(engine.runner.input_batch().make_sampling_metadata(64).all_greedy);
  engine.add("s", prompt_of(3, 2), seeded(3));
  engine.step();
  CHECK_FALSE(engine.runner.input_batch().make_sampling_metadata(64).all_greedy);
  CHECK(engine.generate("g", 8) == dense_greedy(engine.runner, prompt_of(3, 1), 8));
}

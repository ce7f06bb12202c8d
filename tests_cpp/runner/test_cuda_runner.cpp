#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests_cpp/runner/driver.h"
#include "tests_cpp/runner/request_names.h"
#include "tests_cpp/support/on_device.h"

// What CUDA must show beside the rules that it shares with the CPU (DELTAIC_TEST_DEVICE). In f32: in 16 bits the
// tokens of a batch depend on its size, as libraries choose kernels by it.

using namespace deltaic;
using namespace deltaic::test;

namespace {

RunnerOptions cuda_options(bool enforce_eager = false) {
  RunnerOptions options = small_options();
  options.device = kGpu;
  options.enforce_eager = enforce_eager;
  options.async_input_combine = true;
  return options;
}
RunnerOptions cpu_options() {
  RunnerOptions options = small_options();
  options.device = {};
  return options;
}

SamplingParams random_params(std::mt19937& random) {
  SamplingParams params = random() % 2 == 0 ? greedy() : seeded(static_cast<int>(random() % 1000), 1.2F);
  switch (random() % 5) {
    case 0:
      params.presence_penalty = 0.5F, params.repetition_penalty = 1.2F;
      break;
    case 1:
      params.top_k = 20;
      break;
    case 2:
      params.top_p = 0.9F;
      break;
    default:
      break;
  }
  return params;
}

// Both engines get the same requests, and must give the same tokens. Where they do not, the CPU's two best must be so
// close that either is right; the request ends there.
void compare(const TinyModel& model, Engine& cpu, Engine& cuda, unsigned seed, int num_steps) {
  struct Live {
    Tokens tokens;
    bool is_greedy = true;
    int max_tokens = 0;
  };
  std::mt19937 random(seed);
  std::map<std::string, Live> live;
  int num_added = 0, num_tokens = 0, num_close = 0;
  const auto finish = [&](const std::string& id) {
    cpu.finish(id), cuda.finish(id);
    live.erase(id);
  };
  for (int step = 0; step < num_steps; ++step) {
    while (live.size() < 8 && random() % 3 == 0) {
      const std::string id = numbered("r", num_added++);
      const Tokens prompt = prompt_of(1 + static_cast<int>(random() % 17), num_added);
      const SamplingParams params = random_params(random);
      cpu.add(id, prompt, params), cuda.add(id, prompt, params);
      const bool is_argmax = params.is_greedy() && params.repetition_penalty == 1.0F;
      live[id] = {prompt, is_argmax, static_cast<int>(prompt.size() + 1 + random() % 12)};
    }
    if (!live.empty() && random() % 10 == 0) {
      const std::string id = std::next(live.begin(), static_cast<int>(random() % live.size()))->first;
      cpu.preempt(id), cuda.preempt(id);
    }
    const ModelRunnerOutput expected = cpu.step(), actual = cuda.step();
    REQUIRE(actual.req_ids == expected.req_ids);
    REQUIRE(actual.failed_req_ids.empty());
    for (std::size_t i = 0; i < expected.req_ids.size(); ++i) {
      const std::string& id = expected.req_ids[i];
      if (actual.sampled_token_ids[i] != expected.sampled_token_ids[i]) {
        CAPTURE(step);
        CAPTURE(id);
        REQUIRE(live[id].is_greedy);
        REQUIRE(actual.sampled_token_ids[i].size() == 1);
        const DenseForwardOutput dense = cpu.runner.dense_forward(live[id].tokens);
        const float* logits =
            dense.logits.data() + dense.logits.size() - static_cast<std::size_t>(model.config.vocab_size);
        REQUIRE(std::fabs(logits[actual.sampled_token_ids[i][0]] - logits[expected.sampled_token_ids[i][0]]) < 1e-4F);
        ++num_close;
        finish(id);
        continue;
      }
      for (const std::int32_t token : expected.sampled_token_ids[i]) live[id].tokens.push_back(token), ++num_tokens;
      if (static_cast<int>(live[id].tokens.size()) >= live[id].max_tokens) finish(id);
    }
  }
  CHECK(num_tokens > 2 * num_steps);
  CHECK(num_close <= num_tokens / 1000);
}

using Logprobs = std::map<std::string, std::vector<TokenLogprobs>>;

void compare_logprobs(const Logprobs& actual, const Logprobs& expected) {
  REQUIRE(actual.size() == expected.size());
  for (const auto& [id, entries] : expected) {
    REQUIRE(actual.at(id).size() == entries.size());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      CHECK(actual.at(id)[i].token_ids == entries[i].token_ids);
      CHECK(actual.at(id)[i].rank == entries[i].rank);
      REQUIRE(actual.at(id)[i].logprobs.size() == entries[i].logprobs.size());
      for (std::size_t j = 0; j < entries[i].logprobs.size(); ++j)
        CHECK(std::fabs(actual.at(id)[i].logprobs[j] - entries[i].logprobs[j]) < 1e-4F);
    }
  }
}

}  // namespace

TEST_CASE("CUDA gives the CPU's tokens over a thousand random steps, with graphs and without") {
  if (!has_gpu()) return;
  unsigned seed = 1;
  for (const TinyModel& model : {tiny_qwen3_5(), tiny_qwen3_next(), tiny_qwen3()})
    for (const bool enforce_eager : {false, true})
      for (const auto output : {Engine::Output::sync, Engine::Output::async}) {
        CAPTURE(name(model.config.architecture));
        CAPTURE(enforce_eager);
        Engine cpu(make_runner(model, {.num_blocks = 80}, cpu_options()), Engine::Output::sync, 5);
        Engine cuda(make_runner(model, {.num_blocks = 80}, cuda_options(enforce_eager)), output, 5);
        compare(model, cpu, cuda, seed++, enforce_eager ? 100 : 250);
      }
}

TEST_CASE(
    "D62, D63, D64: padded steps write to no block and no slot that no request owns, block 0 among them [sanitizer]") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = cuda_options();
  options.max_num_reqs = 24;
  options.max_num_batched_tokens = 200;
  ModelRunner runner = make_runner(model, {.num_blocks = 200, .num_snapshot_slots = 2}, options);
  // Everything is full of NaN at first; block 0 and the snapshot slots belong to nobody.
  const auto& kv = runner.attn_kv()[0];
  const auto bits = [](const TensorView& view, std::int64_t row) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(view.stride[0]));
    cuda::copy_and_wait(values.data(), view.as<float>() + row * view.stride[0], values.size() * 4);
    return values;
  };
  const auto k0 = bits(kv.k, 0), last_block = bits(kv.k, 199);
  const auto conv = bits(runner.gdn_state()[0].conv, 24), temporal = bits(runner.gdn_state()[2].temporal, 25);
  CHECK(std::all_of(k0.begin(), k0.end(), [](std::int32_t value) { return value == -1; }));

  // 18 rows run as 20, then 17, 5 and 3 rows as they are or padded; a prefill runs between.
  Step first(runner);
  for (int i = 0; i < 18; ++i) {
    const int block = 1 + 5 * i;
    first.admit(numbered("r", i), prompt_of(3, i), {block, block + 1, block + 2, block + 3, block + 4}, 3);
  }
  run_step(runner, first);
  std::vector<int> live;
  for (int i = 0; i < 18; ++i) live.push_back(i);
  std::map<int, int> computed;
  for (const int i : live) computed[i] = 3;
  for (int step = 0; step < 16; ++step) {
    Step next(runner);
    if (step == 4 || step == 8) {
      const std::size_t kept = step == 4 ? 17 : 5;
      while (live.size() > kept) {
        next.finish(numbered("r", live.front()));
        live.erase(live.begin());
      }
    }
    for (const int i : live) next.run(numbered("r", i), computed[i]++, 1);
    const std::string late = numbered("late", step);
    if (step % 3 == 2) next.finish(numbered("late", step - 3)).admit(late, prompt_of(6, step), {190, 191}, 6);
    const ModelRunnerOutput output = run_step(runner, next);
    CHECK(output.failed_req_ids.empty());
  }
  for (const int i : live) {
    const auto tokens = runner.input_batch().token_ids(runner.input_batch().find(numbered("r", i)));
    Tokens expected = prompt_of(3, i);
    for (const std::int32_t token : dense_greedy(runner, expected, 17)) expected.push_back(token);
    CHECK(Tokens(tokens.begin(), tokens.end()) == expected);
  }
  CHECK(bits(kv.k, 0) == k0);
  CHECK(bits(kv.k, 199) == last_block);
  CHECK(bits(runner.gdn_state()[0].conv, 24) == conv);
  CHECK(bits(runner.gdn_state()[2].temporal, 25) == temporal);
}

TEST_CASE("D21: a tail of one token behind a cached prefix gives the token of the whole prompt") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_5();
  ModelRunner runner = make_runner(model, {.num_snapshot_slots = 1}, cuda_options());
  for (int length = 4; length <= 32; length += 4) {
    CAPTURE(length);
    Tokens prompt = prompt_of(length, length);
    std::vector<int> blocks;
    for (int i = 0; i < length / 4; ++i) blocks.push_back(i);
    Step first(runner);
    first.admit("a", prompt, blocks, length);
    first.copy("a", StateCopyKind::snapshot, 8, length);
    run_step(runner, first);
    prompt.push_back(9);
    blocks.push_back(40);
    Step second(runner);
    second.finish("a").admit("b", prompt, blocks, 1, greedy(), length);
    second.copy("b", StateCopyKind::hit, 8, length);
    CHECK(run_step(runner, second).sampled_token_ids[0] == Tokens{dense_argmax(runner, prompt)});
    Step last(runner);
    last.finish("b");
    run_step(runner, last);
  }
}

TEST_CASE("D20: the recurrent state stays finite over 32,768 tokens, in f32 and in bf16") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_5();
  constexpr int kNumTokens = 32768, kNumDecodes = 32;
  Tokens prompt;
  for (int i = 0; i < kNumTokens - kNumDecodes; ++i) prompt.push_back(i * 37 % 61);
  RunnerOptions options = cuda_options();
  options.max_model_len = kNumTokens;
  options.max_num_batched_tokens = 4096;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(name(dtype));
    Engine engine(make_runner(model, {.num_blocks = kNumTokens / 4, .temporal_dtype = dtype}, options),
                  Engine::Output::sync, 4096);
    engine.add("a", prompt, seeded(1));
    CHECK(engine.generate("a", kNumDecodes).size() == kNumDecodes);
    for (const auto& state : engine.runner.gdn_state()) {
      bool is_finite = true;
      if (dtype == DType::f32)
        for (const float value : host_row<float>(state.temporal, 0)) is_finite = is_finite && std::isfinite(value);
      else
        for (const std::uint16_t bits : host_row<std::uint16_t>(state.temporal, 0))
          is_finite = is_finite && std::isfinite(from_bf16(bits));
      CHECK(is_finite);
    }
  }
}

TEST_CASE("two runners of one process, on one device or on two, do not meet") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_next();
  for (int device = 0; device < std::min(num_cuda_devices(), 2); ++device) {
    CAPTURE(device);
    RunnerOptions options = cuda_options();
    options.device.index = device;
    Engine first(make_runner(model, {}, cuda_options()), Engine::Output::async);
    Engine second(make_runner(model, {}, options), Engine::Output::async);
    first.add("a", prompt_of(9, 1)), second.add("a", prompt_of(6, 2), seeded(5));
    for (int i = 0; i < 8; ++i) first.step(), second.step();
    Engine alone(make_runner(model, {}, cpu_options()));
    alone.add("a", prompt_of(9, 1)), alone.add("b", prompt_of(6, 2), seeded(5));
    CHECK(first.generate("a", 8) == alone.generate("a", 8));
    CHECK(second.generate("a", 8) == alone.generate("b", 8));
  }
}

TEST_CASE("logprobs of samples and prompts are the CPU's, whether the device gives them or the host") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_5();
  for (const int num_logprobs : {0, 3, -1}) {
    CAPTURE(num_logprobs);
    SamplingParams params = greedy();
    params.logprobs = num_logprobs;
    params.prompt_logprobs = num_logprobs;
    ModelRunner cpu = make_runner(model, {}, cpu_options()), cuda = make_runner(model, {}, cuda_options());
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      const auto run = [&](ModelRunner& runner) {
        Step next(runner);
        if (step == 0) {
          next.admit("a", prompt_of(12, 1), {0, 1, 2, 3}, 12, params);
          next.admit("b", prompt_of(3, 2), {4, 5, 6}, 3, seeded(3));
        } else {
          next.run("a", 11 + step, 1).run("b", 2 + step, 1);
        }
        return run_step(runner, next);
      };
      const ModelRunnerOutput expected = run(cpu), actual = run(cuda);
      CHECK(actual.sampled_token_ids == expected.sampled_token_ids);
      compare_logprobs(actual.logprobs, expected.logprobs);
      compare_logprobs(actual.prompt_logprobs, expected.prompt_logprobs);
    }
  }
}

TEST_CASE("caches that do not fit are refused with the numbers and the remedy") {
  if (!has_gpu()) return;
  const TinyModel model = tiny_qwen3_5();
  const auto num_blocks = static_cast<int>(device_memory(kGpu).total_bytes / 512);
  CHECK_THROWS_WITH_AS(make_runner(model, {.num_blocks = num_blocks}, cuda_options()),
                       doctest::Contains("lower gpu_memory_utilization"), OutOfMemory);
  Engine engine(make_runner(model, {}, cuda_options()));  // the device is as usable as before
  engine.add("a", prompt_of(5, 1));
  CHECK(engine.generate("a", 2) == dense_greedy(engine.runner, prompt_of(5, 1), 2));
}

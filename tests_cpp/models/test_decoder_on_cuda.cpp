#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include <deltaic/config.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/models/dense_forward.h"
#include "tests_cpp/models/decoder_session.h"
#include "tests_cpp/support/on_device.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::DecoderSession;
using test::kGpu;
using test::make_tiny_model;
using test::TinyModel;
using Chunks = std::vector<DecoderSession::Chunk>;

namespace {

constexpr Architecture kArchitectures[] = {Architecture::qwen3, Architecture::qwen3_moe, Architecture::qwen3_next,
                                           Architecture::qwen3_5, Architecture::qwen3_5_moe};

// Sizes that the fast kernels take.
ModelConfig wide_config(Architecture architecture, int num_layers = 4) {
  return parse_model_config(R"({"vocab_size": 256, "hidden_size": 256, "intermediate_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
    "rope_theta": 10000000.0, "max_position_embeddings": 4096, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "full_attention_interval": 2, "model_type": ")" +
                            std::string(name(architecture)) + R"(", "num_hidden_layers": )" +
                            std::to_string(num_layers) + "}");
}

std::vector<std::int32_t> random_tokens(int count, int seed, int vocab_size = 64) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab_size));
  return tokens;
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  return test::relative_error({actual.begin(), actual.end()}, {expected.begin(), expected.end()});
}

// Against the CPU, which computes in f32 on the same rounded weights.
double limit_of(DType dtype, const ModelConfig& config) {
  if (dtype == DType::f32) return 2e-5;
  if (dtype == DType::bf16) return 3e-2;
  // The delta rule goes through chunks in bf16, whatever the dtype.
  return config.num_layers_of(LayerKind::linear_attention) > 0 && config.linear_key_head_dim == 128 ? 1.2e-2 : 4e-3;
}

std::shared_ptr<const DecoderWeights> dummy(const ModelConfig& config, Device device, DType dtype) {
  return make_dummy_weights(config, {.device = device, .dtype = dtype}, 5);
}

// Prompts, batches of decodes on either side of where kernels change, and both together: the errors of all rows.
std::vector<double> errors_of_steps(const ModelConfig& config, DType dtype, int num_sequences = 20) {
  DecoderSession expected(config, dummy(config, {}, dtype), num_sequences);
  DecoderSession actual(config, dummy(config, kGpu, dtype), num_sequences);
  std::vector<double> errors;
  const auto run = [&](const Chunks& chunks) {
    const auto want = expected.step(chunks), got = actual.step(chunks);
    for (std::size_t i = 0; i < want.size(); ++i) errors.push_back(relative_error(got[i], want[i]));
  };
  Chunks prompts, all, few;
  for (int i = 0; i < num_sequences; ++i) prompts.push_back({i, random_tokens(1 + i * 7 % 33, i)});
  run(prompts);
  for (int round = 0; round < 2; ++round) {
    all.clear(), few.clear();
    for (int i = 0; i < num_sequences; ++i) all.push_back({i, random_tokens(1, 50 + i + round)});
    for (int i = 0; i < num_sequences / 4; ++i) few.push_back({i * 3, random_tokens(1, 90 + i + round)});
    run(all), run(few);
  }
  few.push_back({1, random_tokens(70, 4)});
  few.push_back({4, random_tokens(9, 5)});
  run(few);
  run({few[0]});
  return errors;
}

void check_errors(std::vector<double> errors, const ModelConfig& config, DType dtype) {
  std::sort(errors.begin(), errors.end());
  CAPTURE(name(dtype));
  MESSAGE(name(config.architecture), " ", name(dtype), ": median ", errors[errors.size() / 2], ", worst ",
          errors.back());
  const double limit = limit_of(dtype, config);
  if (config.num_experts > 0 && dtype != DType::f32) {
    // A near tie between experts may fall the other way: such rows differ by more.
    CHECK(errors[errors.size() / 2] <= limit);
    CHECK(errors[errors.size() * 3 / 4] <= 3 * limit);
  } else {
    CHECK(errors.back() <= limit);
  }
  CHECK(std::isfinite(errors.back()));
}

}  // namespace

TEST_CASE("a decoder on CUDA agrees with the CPU, prompts and decodes, whichever kernels run") {
  if (!test::has_gpu()) return;
  for (const Architecture architecture : kArchitectures)
    for (const DType dtype : test::kFloatTypes)
      for (const ModelConfig& config : {wide_config(architecture), make_tiny_model(architecture).config})
        check_errors(errors_of_steps(config, dtype), config, dtype);
}

TEST_CASE("a decoder of two layers runs its steps on CUDA [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const Architecture architecture : {Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    const ModelConfig config = wide_config(architecture, 2);
    check_errors(errors_of_steps(config, DType::bf16, /*num_sequences=*/6), config, DType::bf16);
  }
}

TEST_CASE("a checkpoint on CUDA is the checkpoint on the CPU, in every layout") {
  if (!test::has_gpu()) return;
  ThreadPool threads(2);
  const auto matmul = cuda::make_matmul(0);
  const ops::Context cpu{.device = {}, .stream = {}, .threads = &threads};
  const ops::Context gpu{.device = kGpu, .stream = {}, .threads = nullptr, .matmul = matmul.get()};
  const auto tokens = random_tokens(37, 2);
  for (const Architecture architecture : kArchitectures)
    for (const bool fused : {false, true})
      for (const int shared : {24, 16}) {  // apart from the experts, and among them
        CAPTURE(name(architecture));
        CAPTURE(fused);
        CAPTURE(shared);
        const TinyModel model = make_tiny_model(
            architecture,
            {.tied = fused, .fused_experts = fused, .attention_bias = fused, .shared_intermediate = shared});
        const Checkpoint checkpoint = Checkpoint::from_memory(model.tensors);
        const auto expected = dense_forward(model.config, load_decoder_weights(model.config, checkpoint), cpu, tokens,
                                            /*with_hidden=*/true, {});
        const auto run = [&](DType dtype) {
          const auto weights = load_decoder_weights(model.config, checkpoint, {.device = kGpu, .dtype = dtype});
          return dense_forward(model.config, weights, gpu, tokens, /*with_hidden=*/true, {});
        };
        const auto actual = run(DType::f32);
        CHECK(relative_error(actual.logits, expected.logits) < 2e-5);
        CHECK(relative_error(actual.hidden, expected.hidden) < 2e-5);
        // Sums of up to 48 terms of rounded numbers, with weights far larger than trained ones.
        CHECK(relative_error(run(DType::f16).logits, expected.logits) < 0.1);
      }
}

TEST_CASE("dummy weights on CUDA are those of the CPU, to the bit") {
  if (!test::has_gpu()) return;
  const ModelConfig config = wide_config(Architecture::qwen3_5_moe);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto on_cpu = dummy(config, {}, dtype), on_gpu = dummy(config, kGpu, dtype);
    const auto check = [&](const TensorView& expected, const TensorView& actual) {
      std::vector<char> bytes(actual.num_bytes());
      cuda::copy_and_wait(bytes.data(), actual.data, bytes.size());
      REQUIRE(expected.num_bytes() <= actual.num_bytes());  // the shared expert is the last one there
      CHECK(std::memcmp(bytes.data(), expected.data, expected.num_bytes()) == 0);
    };
    check(on_cpu->embedding.view, on_gpu->embedding.view);
    check(on_cpu->final_norm.view(), on_gpu->final_norm.view());
    const auto &moe = std::get<Moe>(on_cpu->layers[1].feed_forward),
               &other = std::get<Moe>(on_gpu->layers[1].feed_forward);
    check(moe.experts.all_gate_up.view, other.experts.all_gate_up.view);
    check(moe.experts.all_down.view, other.experts.all_down.view);
    check(moe.router.parts[0].weight.view, other.router.parts[0].weight.view);
  }
}

TEST_CASE("on CUDA a prompt cut anywhere gives the logits of the whole") {
  if (!test::has_gpu()) return;
  for (const Architecture architecture : {Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    const ModelConfig config = wide_config(architecture);
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const std::vector<int>& sizes : std::vector<std::vector<int>>{{129, 1}, {64, 64, 1, 1}, {100, 7, 23}}) {
        CAPTURE(name(architecture));
        CAPTURE(name(dtype));
        const auto tokens = random_tokens(130, 3);
        DecoderSession session(config, dummy(config, kGpu, dtype), 2);
        const auto whole = session.run(0, tokens, {130}), cut = session.run(1, tokens, sizes);
        CHECK(relative_error(cut, whole) <=
              (architecture == Architecture::qwen3_5_moe ? 3 : 1) * limit_of(dtype, config));
      }
  }
}

TEST_CASE("on CUDA a decode has the bits that it has alone, among others and among padding rows") {
  if (!test::has_gpu()) return;
  for (const Architecture architecture : kArchitectures) {
    CAPTURE(name(architecture));
    const ModelConfig config = wide_config(architecture);
    const auto weights = dummy(config, kGpu, DType::bf16);
    DecoderSession alone(config, weights, 6), together(config, weights, 6), padded(config, weights, 6);
    for (int i = 0; i < 6; ++i)
      for (DecoderSession* session : {&alone, &together, &padded}) session->step({{i, random_tokens(3 + 9 * i, i)}});
    for (int round = 0; round < 3; ++round) {
      Chunks chunks;
      for (int i = 0; i < 6; ++i) chunks.push_back({i, random_tokens(1, 20 + i + round)});
      std::vector<std::vector<float>> expected;
      for (const auto& chunk : chunks) expected.push_back(alone.step({chunk}).front());
      CHECK(together.step(chunks) == expected);
      CHECK(padded.step(chunks, /*num_padding=*/6, /*padding_len=*/round % 2) == expected);
    }
    for (int i = 0; i < 6; ++i) {
      CHECK(together.states(i) == alone.states(i));
      CHECK(padded.states(i) == alone.states(i));
    }
  }
}

TEST_CASE("a captured step gives what it gives without a graph") {
  if (!test::has_gpu()) return;
  for (const Architecture architecture : {Architecture::qwen3_5, Architecture::qwen3_5_moe})
    for (const int num_sequences : {3, 20}) {
      const ModelConfig config = wide_config(architecture);
      const auto weights = dummy(config, kGpu, DType::bf16);
      DecoderSession eager(config, weights, num_sequences), graphed(config, weights, num_sequences);
      Chunks chunks;
      for (int i = 0; i < num_sequences; ++i) chunks.push_back({i, random_tokens(1, i)});
      for (DecoderSession* session : {&eager, &graphed}) session->step(chunks), session->step(chunks);
      const auto expected = eager.step(chunks);
      graphed.prepare(chunks);
      const cuda::Graph graph(graphed.stream(), [&] { graphed.enqueue(); });
      graph.launch(graphed.stream());
      CHECK(graphed.logits() == expected);
    }
}

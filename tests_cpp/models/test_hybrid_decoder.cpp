#include "cpp/src/models/hybrid_decoder.h"

#include <algorithm>
#include <numeric>
#include <random>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/models/dense_forward.h"
#include "tests_cpp/models/decoder_session.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::DecoderSession;
using test::make_tiny_model;
using test::TinyModel;

namespace {

constexpr Architecture kArchitectures[] = {Architecture::qwen3, Architecture::qwen3_moe, Architecture::qwen3_next,
                                           Architecture::qwen3_5, Architecture::qwen3_5_moe};

std::shared_ptr<const DecoderWeights> load(const TinyModel& model) {
  return load_decoder_weights(model.config, Checkpoint::from_memory(model.tensors));
}

std::vector<std::int32_t> random_tokens(int count, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 64);
  return tokens;
}

DenseForwardOutput dense(const TinyModel& model, const std::vector<std::int32_t>& tokens, bool with_hidden = false,
                         const std::vector<std::int64_t>& positions = {}) {
  ThreadPool threads(2);
  const ops::Context ctx{.device = {}, .stream = {}, .threads = &threads};
  return dense_forward(model.config, load(model), ctx, tokens, with_hidden, positions);
}

std::vector<float> last_row(const DenseForwardOutput& output, int vocab_size) {
  return {output.logits.end() - vocab_size, output.logits.end()};
}

// [num_rows, row_size] with its rows in another order: row i of the result is row order[i].
std::vector<float> permuted(const std::vector<float>& values, const std::vector<std::int64_t>& order,
                            std::int64_t row_size) {
  std::vector<float> result;
  for (const std::int64_t row : order)
    result.insert(result.end(), values.begin() + row * row_size, values.begin() + (row + 1) * row_size);
  return result;
}

}  // namespace

TEST_CASE("logits are finite, and differ from token to token") {
  for (const Architecture architecture : kArchitectures) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture);
    const auto output = dense(model, random_tokens(9, 1), true);
    REQUIRE(output.logits.size() == 9 * 64);
    REQUIRE(output.hidden.size() == 6 * 9 * 32);
    CHECK(std::all_of(output.logits.begin(), output.logits.end(), [](float x) { return std::isfinite(x); }));
    CHECK(last_row(output, 64) != std::vector<float>(output.logits.begin(), output.logits.begin() + 64));
  }
}

TEST_CASE("D18: prefill of T tokens is prefill of T - 1 and one decode, to the bit") {
  for (const Architecture architecture : {Architecture::qwen3_next, Architecture::qwen3_5}) {
    const TinyModel model = make_tiny_model(architecture);
    const auto weights = load(model);
    for (const int num_tokens : {2, 3, 63, 64, 65, 127, 128, 129}) {
      CAPTURE(num_tokens);
      const auto tokens = random_tokens(num_tokens, num_tokens);
      DecoderSession session(model.config, weights, 2);
      const auto whole = session.run(0, tokens, {num_tokens});
      CHECK(session.run(1, tokens, {num_tokens - 1, 1}) == whole);
      CHECK(session.states(0) == session.states(1));
      CHECK(whole == last_row(dense(model, tokens), 64));
    }
  }
}

TEST_CASE("D19: a prompt cut anywhere gives the same logits and states, to the bit") {
  for (const Architecture architecture : kArchitectures) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture);
    const auto weights = load(model);
    for (const std::vector<int>& sizes : std::vector<std::vector<int>>{
             {16, 2, 8, 13}, {270, 88, 212, 203}, {63, 1, 64, 65}, {1, 1, 1, 1, 1}, {2, 3, 1, 60}}) {
      const int num_tokens = std::accumulate(sizes.begin(), sizes.end(), 0);
      CAPTURE(num_tokens);
      const auto tokens = random_tokens(num_tokens, num_tokens);
      DecoderSession session(model.config, weights, 2);
      CHECK(session.run(0, tokens, {num_tokens}) == session.run(1, tokens, sizes));
      CHECK(session.states(0) == session.states(1));
    }
  }
}

TEST_CASE("any pattern of layers runs: mixers in any order, dense layers among MoE layers") {
  const char* patterns[] = {
      R"("layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"])",
      R"("layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"])",
      R"("layer_types": ["linear_attention", "linear_attention", "linear_attention", "linear_attention"])"};
  for (const std::string pattern : patterns) {
    CAPTURE(pattern);
    const TinyModel model = make_tiny_model(
        Architecture::qwen3_next, {.extra_config = pattern + R"(, "decoder_sparse_step": 2, "mlp_only_layers": [3])"});
    CHECK(model.config.is_moe_layer == std::vector{false, true, false, false});
    const auto tokens = random_tokens(21, 4);
    DecoderSession session(model.config, load(model), 2);
    const auto whole = session.run(0, tokens, {21});
    CHECK(session.run(1, tokens, {4, 16, 1}) == whole);
    CHECK(session.states(0) == session.states(1));
    CHECK(whole == last_row(dense(model, tokens), 64));
    CHECK(std::all_of(whole.begin(), whole.end(), [](float x) { return std::isfinite(x); }));
  }
}

TEST_CASE("sequences in one batch give what they give alone, to the bit, in caches full of NaN") {
  for (const Architecture architecture : kArchitectures) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture);
    const auto weights = load(model);
    const std::vector<int> lengths{1, 3, 40, 5, 17};
    std::vector<DecoderSession::Chunk> prompts;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      prompts.push_back({static_cast<int>(i), random_tokens(lengths[i], static_cast<int>(i) + 7)});

    DecoderSession together(model.config, weights, 5), alone(model.config, weights, 5);
    std::vector<std::vector<float>> expected;
    for (const auto& prompt : prompts) expected.push_back(alone.step({prompt}).front());
    CHECK(together.step(prompts) == expected);

    // Decode steps, one sequence in the middle of a prompt, and in another order.
    const std::vector<DecoderSession::Chunk> next{{4, {1}}, {0, {2}}, {2, random_tokens(9, 3)}, {1, {3}}};
    expected.clear();
    for (const auto& chunk : next) expected.push_back(alone.step({chunk}).front());
    CHECK(together.step(next) == expected);
    for (int sequence = 0; sequence < 5; ++sequence) CHECK(together.states(sequence) == alone.states(sequence));
  }
}

TEST_CASE("fused experts and an expert a tensor are one model") {
  for (const Architecture architecture : {Architecture::qwen3_moe, Architecture::qwen3_5_moe}) {
    const TinyModel fused = make_tiny_model(architecture, {.fused_experts = true});
    TinyModel split{.config = fused.config, .tensors = fused.tensors, .memory = {}};
    const std::int64_t intermediate = 16, hidden = 32;
    for (int layer = 0; layer < 4; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".mlp.experts.";
      const auto gate_up = fused.values(p + "gate_up_proj"), down = fused.values(p + "down_proj");
      for (std::int64_t e = 0; e < 4; ++e) {
        const auto part = [&](const std::vector<float>& values, std::int64_t begin, std::int64_t count) {
          return std::vector<float>(values.begin() + begin, values.begin() + begin + count);
        };
        const std::string q = p + std::to_string(e) + ".";
        const std::int64_t size = intermediate * hidden;
        split.set(q + "gate_proj.weight", {intermediate, hidden}, part(gate_up, 2 * e * size, size));
        split.set(q + "up_proj.weight", {intermediate, hidden}, part(gate_up, (2 * e + 1) * size, size));
        split.set(q + "down_proj.weight", {hidden, intermediate}, part(down, e * size, size));
      }
      split.tensors.erase(p + "gate_up_proj");
      split.tensors.erase(p + "down_proj");
    }
    const auto tokens = random_tokens(20, 5);
    CHECK(dense(fused, tokens).logits == dense(split, tokens).logits);
  }
}

TEST_CASE("Qwen3-Next's grouped projections are Qwen3.5's in another order") {
  const TinyModel next = make_tiny_model(Architecture::qwen3_next);
  TinyModel plain{.config = make_tiny_model(Architecture::qwen3_5_moe).config, .tensors = next.tensors, .memory = {}};
  // Row numbers of q, k, v, z and of b, a in the grouped tensors: 2 groups, 2 value heads each, all head sizes 8.
  std::vector<std::int64_t> q, k, v, z, b, a;
  for (std::int64_t group = 0; group < 2; ++group) {
    const std::int64_t first = group * 48;
    for (std::int64_t i = 0; i < 8; ++i) q.push_back(first + i), k.push_back(first + 8 + i);
    for (std::int64_t i = 0; i < 16; ++i) v.push_back(first + 16 + i), z.push_back(first + 32 + i);
    for (std::int64_t i = 0; i < 2; ++i) b.push_back(4 * group + i), a.push_back(4 * group + 2 + i);
  }
  std::vector<std::int64_t> qkv = q;
  qkv.insert(qkv.end(), k.begin(), k.end());
  qkv.insert(qkv.end(), v.begin(), v.end());
  for (int layer = 0; layer < 3; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".linear_attn.";
    const auto qkvz = next.values(p + "in_proj_qkvz.weight"), ba = next.values(p + "in_proj_ba.weight");
    plain.set(p + "in_proj_qkv.weight", {64, 32}, permuted(qkvz, qkv, 32));
    plain.set(p + "in_proj_z.weight", {32, 32}, permuted(qkvz, z, 32));
    plain.set(p + "in_proj_b.weight", {4, 32}, permuted(ba, b, 32));
    plain.set(p + "in_proj_a.weight", {4, 32}, permuted(ba, a, 32));
  }
  const auto tokens = random_tokens(30, 6);
  CHECK(dense(next, tokens).logits == dense(plain, tokens).logits);
}

TEST_CASE("an attention bias is used") {
  const TinyModel with_bias = make_tiny_model(Architecture::qwen3, {.attention_bias = true});
  TinyModel without{.config = with_bias.config, .tensors = with_bias.tensors, .memory = {}};
  without.config.attention_bias = false;
  TinyModel zero{.config = with_bias.config, .tensors = with_bias.tensors, .memory = {}};
  for (const auto& [tensor_name, view] : with_bias.tensors)
    if (tensor_name.ends_with(".bias")) zero.set(tensor_name, {view.shape[0]}, std::vector<float>(view.numel()));
  const auto tokens = random_tokens(8, 7);
  CHECK(dense(zero, tokens).logits == dense(without, tokens).logits);
  for (const char* projection : {"q", "k", "v", "o"}) {
    CAPTURE(projection);
    TinyModel one = zero;
    const std::string bias = std::string("model.layers.2.self_attn.") + projection + "_proj.bias";
    one.tensors[bias] = with_bias.tensors.at(bias);
    CHECK(dense(one, tokens).logits != dense(without, tokens).logits);
  }
}

TEST_CASE("three equal position streams are the one, and a stream that differs is used") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5);
  const auto tokens = random_tokens(6, 8);
  std::vector<std::int64_t> one{0, 1, 2, 3, 4, 5}, three;
  for (int i = 0; i < 3; ++i) three.insert(three.end(), one.begin(), one.end());
  CHECK(dense(model, tokens, false, three).logits == dense(model, tokens).logits);
  CHECK(dense(model, tokens, false, one).logits == dense(model, tokens).logits);
  three[8] = 7;
  CHECK(dense(model, tokens, false, three).logits != dense(model, tokens).logits);
}

TEST_CASE("logits of any rows, in any order, more of them than max_num_tokens") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5);
  const auto tokens = random_tokens(5, 9);
  DecoderSession session(model.config, load(model), 1, /*max_num_tokens=*/5);
  session.step({{0, tokens}});
  const auto expected = dense(model, tokens, /*with_hidden=*/true);
  std::vector<float> hidden(expected.hidden.end() - 5 * 32, expected.hidden.end());
  const TensorView rows = make_view(hidden.data(), DType::f32, {5, 32});
  std::vector<std::int32_t> indices{4, 0, 0, 3, 1, 2, 4};
  const TensorView index_view = make_view(indices.data(), DType::i32, {7});
  std::vector<float> logits(7 * 64);
  session.decoder().compute_logits(rows, index_view, make_view(logits.data(), DType::f32, {7, 64}));
  for (std::size_t i = 0; i < indices.size(); ++i)
    CHECK(std::equal(logits.begin() + static_cast<std::ptrdiff_t>(i) * 64,
                     logits.begin() + static_cast<std::ptrdiff_t>(i + 1) * 64,
                     expected.logits.begin() + indices[i] * 64));

  std::int32_t outside = 5;
  CHECK_THROWS_WITH_AS(session.decoder().compute_logits(rows, make_view(&outside, DType::i32, {1}),
                                                        make_view(logits.data(), DType::f32, {1, 64})),
                       "row 5 of 5 hidden states", InvalidArgument);
  CHECK_THROWS_WITH_AS(
      session.decoder().compute_logits(rows, index_view, make_view(logits.data(), DType::f32, {6, 64})),
      "logits are [6, 64], wanted [7, 64]", InvalidArgument);
}

TEST_CASE("a step that does not fit is refused with the numbers") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5);
  DecoderSession session(model.config, load(model), 1, /*max_num_tokens=*/4);
  CHECK_THROWS_WITH_AS(session.step({{0, random_tokens(5, 1)}}), "a step of 5 tokens, the most is 4", InvalidArgument);
  CHECK_THROWS_WITH_AS(session.decoder().forward({.input_ids = make_view(nullptr, DType::i32, {0}),
                                                  .positions = {},
                                                  .query_start_loc = {},
                                                  .seq_lens = {},
                                                  .block_table = {},
                                                  .slot_mapping = {},
                                                  .gdn = {}},
                                                 {}),
                       "caches of 0 attention and 0 recurrent layers, the model has 1 and 3", InvalidArgument);
  CHECK_THROWS_AS(DecoderSession(model.config, load(model), 1, 0), InvalidArgument);
}

TEST_CASE("a dense forward refuses what it cannot run") {
  const TinyModel model = make_tiny_model(Architecture::qwen3);
  CHECK_THROWS_WITH_AS(dense(model, {}), "no tokens", InvalidArgument);
  CHECK_THROWS_WITH_AS(dense(model, {3, 64}), "token id 64 is outside the vocabulary of 64", InvalidArgument);
  CHECK_THROWS_WITH_AS(dense(model, {-1}), "token id -1 is outside the vocabulary of 64", InvalidArgument);
  CHECK_THROWS_WITH_AS(dense(model, {1, 2}, false, {0, 1, 2}), "3 positions for 2 tokens, wanted 1 or 3 a token",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(dense(model, {1}, false, {-4}), "a position is -4, below 0", InvalidArgument);
}

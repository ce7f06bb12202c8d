#include <cstring>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/ops/gated_delta_net.h"
#include "tests_cpp/support/tensors.h"

namespace deltaic {
namespace {

constexpr int kDrafts = 3;
constexpr int kColumns = 1 + kDrafts;

// A GDN layer with separate projections [q | k | v | z | b | a] of num_tokens tokens, all random.
struct Layer {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  std::int64_t row = 0;
  Tensor proj, conv_weight, A_log, dt_bias;

  Layer(ops::GdnShape s, std::int64_t num_tokens, std::uint64_t seed) : shape(s) {
    const std::int64_t dk = s.key_head_dim, dv = s.value_head_dim, r = s.heads_per_group();
    const std::int64_t q = s.num_key_heads * dk, v = s.num_value_heads * dv;
    layout = {.q = 0,
              .q_stride = dk,
              .k = q,
              .k_stride = dk,
              .v = 2 * q,
              .v_group_stride = r * dv,
              .z = 2 * q + v,
              .z_group_stride = r * dv,
              .b = 2 * q + 2 * v,
              .b_group_stride = r,
              .a = 2 * q + 2 * v + s.num_value_heads,
              .a_group_stride = r};
    row = 2 * q + 2 * v + 2 * s.num_value_heads;
    proj = test::random({num_tokens, row}, DType::f32, seed, 2.0);
    conv_weight = test::random({s.conv_dim(), s.conv_kernel}, DType::f32, 2);
    A_log = test::random({s.num_value_heads}, DType::f32, 3);
    dt_bias = test::random({s.num_value_heads}, DType::f32, 4);
  }
  std::int64_t num_outputs() const { return std::int64_t{shape.num_value_heads} * shape.value_head_dim; }
};

// States of `num_slots` slots with room for kDrafts drafts; every value is NaN at first.
struct States {
  Tensor conv, temporal;
  States(const Layer& layer, std::int64_t num_slots, DType dtype)
      : conv(test::filled({num_slots, layer.shape.conv_dim(), layer.shape.conv_kernel - 1 + kDrafts}, dtype, NAN)),
        temporal(
            test::filled({num_slots, layer.shape.num_value_heads, layer.shape.value_head_dim, layer.shape.key_head_dim},
                         dtype, NAN)) {}
};

struct Row {
  std::int64_t slot = 0;
  int num_accepted = 0;  // 0: plain
  bool has_state = true;
  std::vector<std::int64_t> tokens;  // rows of the layer's proj
};

// Runs the rows as one step; the outputs of each.
std::vector<std::vector<float>> run(const Layer& layer, const States& states, const std::vector<Row>& rows) {
  std::vector<std::int32_t> start{0}, slots, accepted;
  std::vector<std::uint8_t> initial;
  std::vector<std::int64_t> tokens;
  for (const Row& row : rows) {
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    start.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(static_cast<std::int32_t>(row.slot));
    accepted.push_back(row.num_accepted);
    initial.push_back(row.has_state ? 1 : 0);
  }
  const auto n = static_cast<std::int64_t>(tokens.size());
  const Tensor proj(DType::f32, {n, layer.row}), qkv(DType::f32, {n, layer.shape.conv_dim()});
  const Tensor out(DType::f32, {n, layer.shape.num_value_heads, layer.shape.value_head_dim});
  for (std::int64_t i = 0; i < n; ++i)
    std::memcpy(proj.as<float>() + i * layer.row,
                layer.proj.as<float>() + tokens[static_cast<std::size_t>(i)] * layer.row,
                static_cast<std::size_t>(layer.row) * sizeof(float));
  const Tensor starts = test::ints(start), indices = test::ints(slots), counts = test::ints(accepted);
  const Tensor flags = test::bytes(initial);
  const ops::GdnSequences sequences{.query_start_loc = starts.view(),
                                    .state_indices = indices.view(),
                                    .has_initial_state = flags.view(),
                                    .num_accepted = counts.view(),
                                    .num_draft_tokens = kDrafts};
  const auto ctx = test::cpu_context();
  ops::causal_conv(ctx, layer.shape, layer.layout, proj.view(), layer.conv_weight.view(), sequences, states.conv.view(),
                   qkv.view());
  ops::gated_delta_rule(ctx, layer.shape, layer.layout, qkv.view(), proj.view(), layer.A_log.view(),
                        layer.dt_bias.view(), sequences, states.temporal.view(), out.view());
  std::vector<std::vector<float>> result;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float* data = out.as<float>();
    result.emplace_back(data + start[i] * layer.num_outputs(), data + start[i + 1] * layer.num_outputs());
  }
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const ops::GdnShape kShapes[] = {
    {.num_key_heads = 2, .num_value_heads = 4, .key_head_dim = 16, .value_head_dim = 16, .conv_kernel = 4},
    {.num_key_heads = 1, .num_value_heads = 3, .key_head_dim = 64, .value_head_dim = 40, .conv_kernel = 4},
    {.num_key_heads = 1, .num_value_heads = 2, .key_head_dim = 128, .value_head_dim = 96, .conv_kernel = 4},
    {.num_key_heads = 1, .num_value_heads = 2, .key_head_dim = 24, .value_head_dim = 8, .conv_kernel = 3},
    {.num_key_heads = 1, .num_value_heads = 1, .key_head_dim = 8, .value_head_dim = 8, .conv_kernel = 2}};

}  // namespace

TEST_CASE("tokens after any accepted count give the bits of one token a step") {
  for (const ops::GdnShape& shape : kShapes)
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(shape.key_head_dim);
      CAPTURE(name(dtype));
      const Layer layer(shape, 400, 11);
      const States drafted(layer, 2 * kColumns, dtype), plain(layer, 2, dtype);
      const std::int64_t slot = kColumns;
      run(layer, drafted, {{.slot = slot, .num_accepted = 0, .has_state = false, .tokens = {0, 1, 2, 3, 4}}});
      run(layer, plain, {{.slot = 1, .num_accepted = 0, .has_state = false, .tokens = {0, 1, 2, 3, 4}}});
      // Each step verifies `q` tokens and accepts `a` of them, for all pairs, in all orders of two.
      int accepted = 1;
      std::int64_t next = 5, wrong = 200;
      for (int q = 1; q <= kColumns; ++q)
        for (int a = 1; a <= q; ++a)
          for (int q2 = 1; q2 <= kColumns; ++q2) {
            for (const auto& [num_tokens, num_accepted] : {std::pair{q, a}, std::pair{q2, q2}}) {
              Row row{.slot = slot, .num_accepted = accepted, .tokens = {}};
              for (int t = 0; t < num_tokens; ++t) row.tokens.push_back(t < num_accepted ? next + t : wrong++);
              const auto together = run(layer, drafted, {row}).front();
              for (int t = 0; t < num_accepted; ++t) {
                const auto alone = run(layer, plain, {{.slot = 1, .tokens = {next + t}}}).front();
                const auto begin = together.begin() + t * layer.num_outputs();
                REQUIRE(same_bits({begin, begin + layer.num_outputs()}, alone));
              }
              next += num_accepted, accepted = num_accepted;
            }
            if (next > 190) next = 5;
            if (wrong > 390) wrong = 200;
          }
    }
}

TEST_CASE("plain and verified sequences of one step do not touch each other") {
  // D45 and D46: tokens and gates of a mixed batch; D43: a row without drafts next to rows with some.
  const Layer layer(kShapes[0], 400, 5);
  const States together(layer, 6 * kColumns, DType::f32), alone(layer, 6 * kColumns, DType::f32);
  std::vector<Row> prompts, rows;
  for (int i = 0; i < 6; ++i) {
    Row prompt{.slot = i * kColumns, .num_accepted = 0, .has_state = false, .tokens = {}};
    for (int t = 0; t < 3 + i; ++t) prompt.tokens.push_back(20 * i + t);
    prompts.push_back(prompt);
    Row row{.slot = i * kColumns, .num_accepted = i % 3 == 2 ? 0 : 1, .tokens = {}};
    for (int t = 0; t < (i % 3 == 2 ? 9 : 1 + i % kColumns); ++t) row.tokens.push_back(200 + 20 * i + t);
    rows.push_back(row);
  }
  run(layer, together, prompts);
  for (const Row& prompt : prompts) run(layer, alone, {prompt});
  for (int round = 0; round < 3; ++round) {
    const auto outputs = run(layer, together, rows);
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(same_bits(outputs[i], run(layer, alone, {rows[i]}).front()));
    for (Row& row : rows)
      if (row.num_accepted > 0) row.num_accepted = static_cast<int>(row.tokens.size());
    std::rotate(rows.begin(), rows.begin() + 1, rows.end());
  }
}

TEST_CASE("a plain sequence of as many tokens as a verified one leaves its state in the first slot") {
  // D42: a part of a prompt with 1 + S tokens is no decode.
  const Layer layer(kShapes[0], 64, 6);
  const States cut(layer, kColumns, DType::f32), whole(layer, kColumns, DType::f32);
  run(layer, cut, {{.slot = 0, .has_state = false, .tokens = {0, 1, 2}}});
  run(layer, cut, {{.slot = 0, .tokens = {3, 4, 5, 6}}});
  run(layer, whole, {{.slot = 0, .has_state = false, .tokens = {0, 1, 2, 3, 4, 5, 6}}});
  const auto a = run(layer, cut, {{.slot = 0, .num_accepted = 1, .tokens = {7, 8}}}).front();
  CHECK(same_bits(a, run(layer, whole, {{.slot = 0, .num_accepted = 1, .tokens = {7, 8}}}).front()));
}

TEST_CASE("a padding row reads and writes nothing") {
  // D44 and D54: padding must not reach slot 0, nor any other.
  const Layer layer(kShapes[0], 64, 7);
  const States states(layer, 2 * kColumns, DType::f32);
  run(layer, states, {{.slot = 0, .has_state = false, .tokens = {0, 1, 2}}});
  const auto bytes = [&](const Tensor& tensor) {
    const auto* data = static_cast<const char*>(tensor.view().data);
    return std::vector<char>(data, data + tensor.view().num_bytes());
  };
  const auto conv = bytes(states.conv), temporal = bytes(states.temporal);
  run(layer, states, {{.slot = -1, .num_accepted = 1, .tokens = {3, 4, 5}}, {.slot = -1, .tokens = {6}}});
  CHECK(conv == bytes(states.conv));
  CHECK(temporal == bytes(states.temporal));
}

TEST_CASE("a verified sequence that does not fit is refused with the numbers") {
  const Layer layer(kShapes[0], 64, 8);
  const States states(layer, kColumns, DType::f32);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = kColumns + 1, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = -1, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = 1, .tokens = {0, 1, 2, 3, 4}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 1, .num_accepted = 1, .tokens = {0}}}), InvalidArgument);
}

}  // namespace deltaic

#include <cstring>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/ops/gated_delta_net.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/tensors.h"

namespace deltaic {
namespace {

constexpr int kDrafts = 3;

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

// States of `num_slots` slots with room for num_drafts drafts, on the host; every value is NaN at first. Steps run on
// `device`.
struct States {
  int num_drafts;
  Device device{};
  Tensor conv, temporal, replay;
  States(const Layer& layer, std::int64_t num_slots, DType dtype, int drafts = kDrafts)
      : num_drafts(drafts),
        conv(test::filled({num_slots, layer.shape.conv_dim(), layer.shape.conv_kernel - 1 + drafts}, dtype, NAN)),
        temporal(
            test::filled({num_slots, layer.shape.num_value_heads, layer.shape.value_head_dim, layer.shape.key_head_dim},
                         dtype, NAN)),
        replay(test::filled({num_slots, 1 + drafts, layer.shape.replay_size()}, DType::f32, NAN)) {}
};

struct Row {
  std::int64_t slot = 0;
  int num_accepted = 0;  // 0: plain
  ops::InitialState initial = ops::InitialState::slot;
  std::vector<std::int64_t> tokens;  // rows of the layer's proj
  int snapshot_slot = -1, snapshot_offset = -1;
};
constexpr auto kFresh = ops::InitialState::zero;
constexpr auto kReplay = ops::InitialState::replay;

// Runs the rows as one step on copies; the outputs of each.
std::vector<std::vector<float>> run(const Layer& layer, States& states, const std::vector<Row>& rows) {
  std::vector<std::int32_t> start{0}, slots, accepted, snapshot_slots, snapshot_offsets;
  std::vector<std::uint8_t> initial;
  std::vector<std::int64_t> tokens;
  for (const Row& row : rows) {
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    start.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(static_cast<std::int32_t>(row.slot));
    accepted.push_back(row.num_accepted);
    initial.push_back(static_cast<std::uint8_t>(row.initial));
    snapshot_slots.push_back(row.snapshot_slot), snapshot_offsets.push_back(row.snapshot_offset);
  }
  const auto n = static_cast<std::int64_t>(tokens.size());
  const Device device = states.device;
  const Tensor proj(DType::f32, {n, layer.row});
  for (std::int64_t i = 0; i < n; ++i)
    std::memcpy(proj.as<float>() + i * layer.row,
                layer.proj.as<float>() + tokens[static_cast<std::size_t>(i)] * layer.row,
                static_cast<std::size_t>(layer.row) * sizeof(float));
  const auto on_device = [&](const Tensor& tensor) { return test::copy_to(tensor, device); };
  const Tensor starts = on_device(test::ints(start)), indices = on_device(test::ints(slots)),
               counts = on_device(test::ints(accepted)), flags = on_device(test::bytes(initial)),
               copy_slots = on_device(test::ints(snapshot_slots)),
               copy_offsets = on_device(test::ints(snapshot_offsets));
  const ops::GdnSequences sequences{.query_start_loc = starts.view(),
                                    .state_indices = indices.view(),
                                    .has_initial_state = flags.view(),
                                    .num_accepted = counts.view(),
                                    .num_draft_tokens = states.num_drafts,
                                    .snapshot_slots = copy_slots.view(),
                                    .snapshot_offsets = copy_offsets.view()};
  const auto ctx = test::context_of(device);
  const Tensor inputs = on_device(proj), weight = on_device(layer.conv_weight), A_log = on_device(layer.A_log),
               dt_bias = on_device(layer.dt_bias), conv = on_device(states.conv), temporal = on_device(states.temporal),
               replay = on_device(states.replay);
  const Tensor qkv(DType::f32, {n, layer.shape.conv_dim()}, device);
  const Tensor device_out(DType::f32, {n, layer.shape.num_value_heads, layer.shape.value_head_dim}, device);
  ops::causal_conv(ctx, layer.shape, layer.layout, inputs.view(), weight.view(), sequences, conv.view(), qkv.view());
  ops::gated_delta_rule(ctx, layer.shape, layer.layout, qkv.view(), inputs.view(), A_log.view(), dt_bias.view(),
                        sequences, temporal.view(), replay.view(), device_out.view());
  const Tensor out = test::copy_to(device_out, Device{});
  states.conv = test::copy_to(conv, Device{}), states.temporal = test::copy_to(temporal, Device{}),
  states.replay = test::copy_to(replay, Device{});
  std::vector<std::vector<float>> result;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float* data = out.as<float>();
    result.emplace_back(data + start[i] * layer.num_outputs(), data + start[i + 1] * layer.num_outputs());
  }
  return result;
}

// The bytes of a slot of states; of a conv state the first `positions` of each channel.
std::vector<char> slot_bytes(const Tensor& states, std::int64_t slot, std::int64_t positions = -1) {
  const TensorView view = states.view();
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  const auto* data = static_cast<const char*>(view.data) + slot * view.stride[0] * element;
  if (positions < 0) return {data, data + view.stride[0] * element};
  std::vector<char> bytes;
  for (std::int64_t channel = 0; channel < view.shape[1]; ++channel) {
    const char* row = data + channel * view.stride[1] * element;
    bytes.insert(bytes.end(), row, row + positions * element);
  }
  return bytes;
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

void check_bits(Device device, const ops::GdnShape& shape, DType dtype, int num_drafts) {
  CAPTURE(device.type == DeviceType::cuda);
  CAPTURE(shape.key_head_dim);
  CAPTURE(name(dtype));
  CAPTURE(num_drafts);
  const Layer layer(shape, 400, 11);
  const int most = 1 + num_drafts, snapshot = 2;
  States drafted(layer, 3, dtype, num_drafts), plain(layer, 2, dtype, num_drafts);
  drafted.device = plain.device = device;
  run(layer, drafted, {{.slot = 1, .initial = kFresh, .tokens = {0, 1, 2, 3, 4}}});
  run(layer, plain, {{.slot = 1, .initial = kFresh, .tokens = {0, 1, 2, 3, 4}}});
  // Each step verifies `q` tokens and accepts `a` of them, for all pairs, in all orders of two; a snapshot is
  // taken behind every token in turn, one beyond the step and one of a rejected token among them.
  int accepted = 1, step = 0;
  auto initial = ops::InitialState::slot;
  std::int64_t next = 5, wrong = 200;
  for (int q = 1; q <= most; ++q)
    for (int a = 1; a <= q; ++a)
      for (int q2 = 1; q2 <= most; ++q2) {
        for (const auto& [num_tokens, num_accepted] : {std::pair{q, a}, std::pair{q2, q2}}) {
          Row row{.slot = 1, .num_accepted = accepted, .initial = initial, .tokens = {}};
          for (int t = 0; t < num_tokens; ++t) row.tokens.push_back(t < num_accepted ? next + t : wrong++);
          row.snapshot_slot = snapshot, row.snapshot_offset = step++ % (most + 1);
          const auto before = slot_bytes(plain.temporal, 1);
          const auto together = run(layer, drafted, {row}).front();
          for (int t = 0; t < num_accepted; ++t) {
            const auto alone = run(layer, plain, {{.slot = 1, .tokens = {next + t}}}).front();
            const auto begin = together.begin() + t * layer.num_outputs();
            REQUIRE(same_bits({begin, begin + layer.num_outputs()}, alone));
            if (t != row.snapshot_offset) continue;
            REQUIRE(slot_bytes(drafted.temporal, snapshot) == slot_bytes(plain.temporal, 1));
            REQUIRE(slot_bytes(drafted.conv, snapshot, shape.conv_kernel - 1) ==
                    slot_bytes(plain.conv, 1, shape.conv_kernel - 1));
          }
          const bool at_once = device.type == DeviceType::cpu && num_tokens == 1;
          REQUIRE(slot_bytes(drafted.temporal, 1) == (at_once ? slot_bytes(plain.temporal, 1) : before));
          next += num_accepted, accepted = num_accepted, initial = kReplay;
        }
        if (next > 190) next = 5;
        if (wrong > 390) wrong = 200;
      }
}

}  // namespace

TEST_CASE("tokens after any accepted count give the bits of one token a step, and leave its states behind") {
  for (const ops::GdnShape& shape : kShapes)
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (int num_drafts = 1; num_drafts <= kDrafts; ++num_drafts) check_bits(Device{}, shape, dtype, num_drafts);
}

TEST_CASE("so they do on a GPU") {
  for (const Device device : test::devices())
    if (device.type == DeviceType::cuda)
      for (const ops::GdnShape& shape : kShapes)
        for (const DType dtype : {DType::f32, DType::bf16}) check_bits(device, shape, dtype, kDrafts);
}

TEST_CASE("a verified sequence without a state leaves zeros, and its tokens in its rows") {
  const Layer layer(kShapes[0], 64, 12);
  States states(layer, 1, DType::f32), plain(layer, 1, DType::f32);
  const auto first = run(layer, states, {{.num_accepted = 1, .initial = kFresh, .tokens = {0, 1, 2}}}).front();
  CHECK(same_bits(first, run(layer, plain, {{.initial = kFresh, .tokens = {0, 1, 2}}}).front()));
  for (const char byte : slot_bytes(states.temporal, 0)) REQUIRE(byte == 0);
  const auto next = run(layer, states, {{.num_accepted = 3, .initial = kReplay, .tokens = {3}}}).front();
  CHECK(same_bits(next, run(layer, plain, {{.tokens = {3}}}).front()));
}

TEST_CASE("plain and verified sequences of one step do not touch each other") {
  // D45 and D46: tokens and gates of a mixed batch; D43: a row without drafts next to rows with some.
  const Layer layer(kShapes[0], 400, 5);
  States together(layer, 6, DType::f32), alone(layer, 6, DType::f32);
  std::vector<Row> prompts, rows;
  for (int i = 0; i < 6; ++i) {
    Row prompt{.slot = i, .initial = kFresh, .tokens = {}};
    for (int t = 0; t < 3 + i; ++t) prompt.tokens.push_back(20 * i + t);
    prompts.push_back(prompt);
    Row row{.slot = i, .num_accepted = i % 3 == 2 ? 0 : 1, .tokens = {}};
    for (int t = 0; t < (i % 3 == 2 ? 9 : 1 + i % (1 + kDrafts)); ++t) row.tokens.push_back(200 + 20 * i + t);
    rows.push_back(row);
  }
  run(layer, together, prompts);
  for (const Row& prompt : prompts) run(layer, alone, {prompt});
  for (int round = 0; round < 3; ++round) {
    const auto outputs = run(layer, together, rows);
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(same_bits(outputs[i], run(layer, alone, {rows[i]}).front()));
    for (Row& row : rows)
      if (row.num_accepted > 0) row.num_accepted = static_cast<int>(row.tokens.size()), row.initial = kReplay;
    std::rotate(rows.begin(), rows.begin() + 1, rows.end());
  }
}

TEST_CASE("a plain sequence of as many tokens as a verified one leaves its state in the slot") {
  // D42: a part of a prompt with 1 + S tokens is no decode.
  const Layer layer(kShapes[0], 64, 6);
  States cut(layer, 1, DType::f32), whole(layer, 1, DType::f32);
  run(layer, cut, {{.slot = 0, .initial = kFresh, .tokens = {0, 1, 2}}});
  run(layer, cut, {{.slot = 0, .tokens = {3, 4, 5, 6}}});
  run(layer, whole, {{.slot = 0, .initial = kFresh, .tokens = {0, 1, 2, 3, 4, 5, 6}}});
  const auto a = run(layer, cut, {{.slot = 0, .num_accepted = 1, .tokens = {7, 8}}}).front();
  CHECK(same_bits(a, run(layer, whole, {{.slot = 0, .num_accepted = 1, .tokens = {7, 8}}}).front()));
}

TEST_CASE("a padding row reads and writes nothing") {
  // D44 and D54: padding must not reach slot 0, nor any other.
  const Layer layer(kShapes[0], 64, 7);
  States states(layer, 2, DType::f32);
  run(layer, states, {{.slot = 0, .initial = kFresh, .tokens = {0, 1, 2}}});
  const auto bytes = [&](const Tensor& tensor) {
    const auto* data = static_cast<const char*>(tensor.view().data);
    return std::vector<char>(data, data + tensor.view().num_bytes());
  };
  const auto conv = bytes(states.conv), temporal = bytes(states.temporal), replay = bytes(states.replay);
  run(layer, states,
      {{.slot = -1, .num_accepted = 1, .tokens = {3, 4, 5}, .snapshot_slot = 1, .snapshot_offset = 0},
       {.slot = -1, .num_accepted = 2, .initial = kReplay, .tokens = {6}},
       {.slot = -1, .tokens = {7}}});
  CHECK(conv == bytes(states.conv));
  CHECK(temporal == bytes(states.temporal));
  CHECK(replay == bytes(states.replay));
}

TEST_CASE("a verified sequence that does not fit is refused with the numbers") {
  const Layer layer(kShapes[0], 64, 8);
  States states(layer, 1, DType::f32);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = kDrafts + 2, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = -1, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .num_accepted = 1, .tokens = {0, 1, 2, 3, 4}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 1, .num_accepted = 1, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.slot = 0, .initial = kReplay, .tokens = {0}}}), InvalidArgument);
  CHECK_THROWS_AS(run(layer, states, {{.num_accepted = 1, .tokens = {0}, .snapshot_slot = 1, .snapshot_offset = 0}}),
                  InvalidArgument);
  States mixed(layer, 1, DType::f32);
  mixed.replay = test::filled({1, kDrafts, layer.shape.replay_size()}, DType::f32, NAN);
  CHECK_THROWS_WITH_AS(run(layer, mixed, {{.num_accepted = 1, .tokens = {0}}}),
                       doctest::Contains("replay has rows of 3 tokens a slot, 3 draft tokens need 4"), InvalidArgument);
}

}  // namespace deltaic

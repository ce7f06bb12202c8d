#include <doctest/doctest.h>

#include "tests_cpp/ops/gdn_layer.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

// Verified steps of gdn_mixer, against one token after another in double.

namespace deltaic {
namespace {

using namespace gdn_test;
using Tokens = std::vector<std::int64_t>;  // rows of a layer's proj

// One sequence in double.
class Stream {
 public:
  explicit Stream(const Layer& layer)
      : layer_(layer),
        inputs_(static_cast<std::size_t>(layer.shape.conv_dim()),
                std::vector<double>(static_cast<std::size_t>(layer.shape.conv_kernel - 1))),
        states_(static_cast<std::size_t>(layer.shape.num_value_heads),
                std::vector<double>(static_cast<std::size_t>(layer.shape.value_head_dim * layer.shape.key_head_dim))) {}

  // [num_value_heads, value_head_dim]: what the mixer gives for the next token.
  std::vector<double> next(std::int64_t token) {
    const ops::GdnShape& s = layer_.shape;
    const ops::GdnProjectionLayout& l = layer_.layout;
    const std::int64_t dk = s.key_head_dim, dv = s.value_head_dim, r = s.heads_per_group();
    std::vector<double> outputs;
    for (std::int64_t g = 0; g < s.num_key_heads; ++g) {
      std::vector<double> q, k;
      for (std::int64_t c = 0; c < dk; ++c) {
        q.push_back(convolved(token, l.q + g * l.q_stride + c, g * dk + c));
        k.push_back(convolved(token, l.k + g * l.k_stride + c, (s.num_key_heads + g) * dk + c));
      }
      for (std::int64_t j = 0; j < r; ++j) {
        const std::int64_t h = g * r + j;
        reference::DeltaHead head;
        head.dk = static_cast<std::size_t>(dk), head.dv = static_cast<std::size_t>(dv);
        head.q = q, head.k = k;
        for (std::int64_t c = 0; c < dv; ++c)
          head.v.push_back(
              convolved(token, l.v + g * l.v_group_stride + j * dv + c, 2 * s.num_key_heads * dk + h * dv + c));
        head.beta.push_back(reference::sigmoid(layer_.input(token, l.b + g * l.b_group_stride + j)));
        const double a = layer_.input(token, l.a + g * l.a_group_stride + j) + layer_.dt_bias.as<float>()[h];
        head.g.push_back(-std::exp(static_cast<double>(layer_.A_log.as<float>()[h])) * reference::softplus(a));
        const auto o = reference::delta_rule(head, states_[static_cast<std::size_t>(h)]);
        double squares = 0.0;
        for (const double value : o) squares += value * value;
        for (std::int64_t c = 0; c < dv; ++c)
          outputs.push_back(o[static_cast<std::size_t>(c)] / std::sqrt(squares / static_cast<double>(dv) + 1e-6) *
                            layer_.norm_weight.as<float>()[c] *
                            reference::silu(layer_.input(token, l.z + g * l.z_group_stride + j * dv + c)));
      }
    }
    return outputs;
  }

  // [value_head_dim, key_head_dim] of each head.
  const std::vector<std::vector<double>>& states() const { return states_; }
  // The last conv_kernel - 1 inputs of each channel.
  const std::vector<std::vector<double>>& inputs() const { return inputs_; }

 private:
  double convolved(std::int64_t token, std::int64_t column, std::int64_t channel) {
    std::vector<double>& inputs = inputs_[static_cast<std::size_t>(channel)];
    inputs.push_back(layer_.input(token, column));
    double sum = 0.0;
    for (std::size_t j = 0; j < inputs.size(); ++j)
      sum +=
          layer_.conv_weight.as<float>()[channel * layer_.shape.conv_kernel + static_cast<std::int64_t>(j)] * inputs[j];
    inputs.erase(inputs.begin());
    return reference::silu(sum);
  }

  const Layer& layer_;
  std::vector<std::vector<double>> inputs_, states_;
};

struct Row {
  int slot = 0, num_accepted = 0;  // 0: plain
  ops::InitialState initial = ops::InitialState::slot;
  Tokens tokens;
  int snapshot_slot = -1, snapshot_offset = -1;
};

// The states of a layer on a device, and the steps that change them. Everything is NaN at first.
class Runner {
 public:
  Runner(const Layer& layer, Device device, int num_slots, int num_drafts)
      : layer_(layer),
        device_(device),
        num_drafts_(num_drafts),
        dtype_(device.type == DeviceType::cpu ? DType::f32 : layer.proj.view().dtype),
        conv_(on_device(
            test::filled({num_slots, layer.shape.conv_dim(), layer.shape.conv_kernel - 1 + num_drafts}, dtype_, NAN),
            device)),
        temporal_(on_device(
            test::filled({num_slots, layer.shape.num_value_heads, layer.shape.value_head_dim, layer.shape.key_head_dim},
                         layer.temporal.view().dtype, NAN),
            device)),
        replay_(
            on_device(test::filled({num_slots, 1 + num_drafts, layer.shape.replay_size()}, DType::f32, NAN), device)),
        conv_weight_(on_device(layer.conv_weight, device)),
        A_log_(on_device(layer.A_log, device)),
        dt_bias_(on_device(layer.dt_bias, device)),
        norm_weight_(on_device(layer.norm_weight, device)) {}

  // The outputs of all tokens, row after row. The first num_decodes rows are said to be decodes.
  std::vector<double> step(const std::vector<Row>& rows, int num_decodes) const {
    std::vector<std::int32_t> start{0}, slots, accepted, snapshot_slots, snapshot_offsets;
    std::vector<std::uint8_t> initial;
    Tokens tokens;
    for (const Row& row : rows) {
      tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
      start.push_back(static_cast<std::int32_t>(tokens.size()));
      slots.push_back(row.slot), accepted.push_back(row.num_accepted);
      initial.push_back(static_cast<std::uint8_t>(row.initial));
      snapshot_slots.push_back(row.snapshot_slot), snapshot_offsets.push_back(row.snapshot_offset);
    }
    const auto n = static_cast<std::int64_t>(tokens.size()), num_seqs = static_cast<std::int64_t>(rows.size());
    const Tensor host_proj(dtype_, {n, layer_.row});
    const auto row_bytes = static_cast<std::size_t>(layer_.row) * size_of(dtype_);
    for (std::int64_t i = 0; i < n; ++i) {
      auto* to = static_cast<char*>(host_proj.view().data) + static_cast<std::size_t>(i) * row_bytes;
      const std::int64_t from = tokens[static_cast<std::size_t>(i)] * layer_.row;
      if (dtype_ == layer_.proj.view().dtype)
        std::memcpy(
            to, static_cast<const char*>(layer_.proj.view().data) + static_cast<std::size_t>(from) * size_of(dtype_),
            row_bytes);
      else
        for (std::int64_t c = 0; c < layer_.row; ++c)
          reinterpret_cast<float*>(to)[c] = static_cast<float>(test::element(layer_.proj.view(), from + c));
    }
    const auto ints = [&](const std::vector<std::int32_t>& values) { return on_device(test::ints(values), device_); };
    const Tensor proj = on_device(host_proj, device_), starts = ints(start), indices = ints(slots),
                 counts = ints(accepted);
    const Tensor flags = on_device(test::bytes(initial), device_);
    const Tensor copy_slots = ints(snapshot_slots), copy_offsets = ints(snapshot_offsets);
    const auto num_bytes = ops::gdn_mixer_workspace_bytes(device_, layer_.shape, dtype_, n, num_seqs, num_decodes);
    const Tensor workspace(DType::u8, {static_cast<std::int64_t>(num_bytes)}, device_);
    const Tensor out = on_device(test::filled({n, layer_.shape.num_value_heads, layer_.shape.value_head_dim}, dtype_,
                                              device_.type == DeviceType::cpu ? 0.0 : NAN),
                                 device_);
    ops::gdn_mixer(test::context_of(device_), {.shape = layer_.shape,
                                               .layout = layer_.layout,
                                               .proj = proj.view(),
                                               .conv_weight = conv_weight_.view(),
                                               .A_log = A_log_.view(),
                                               .dt_bias = dt_bias_.view(),
                                               .norm_weight = norm_weight_.view(),
                                               .eps = 1e-6F,
                                               .sequences = {.query_start_loc = starts.view(),
                                                             .state_indices = indices.view(),
                                                             .has_initial_state = flags.view(),
                                                             .num_decodes = num_decodes,
                                                             .num_accepted = counts.view(),
                                                             .num_draft_tokens = num_drafts_,
                                                             .snapshot_slots = copy_slots.view(),
                                                             .snapshot_offsets = copy_offsets.view()},
                                               .conv_state = conv_.view(),
                                               .temporal = temporal_.view(),
                                               .replay = replay_.view(),
                                               .workspace = workspace.view(),
                                               .out = out.view()});
    return test::values(on_host(out));
  }

  // Of one slot, on the host.
  std::vector<double> state(int slot) const { return test::values(on_host(temporal_).view().slice(slot, slot + 1)); }
  std::vector<double> inputs(int slot) const {
    const Tensor host = on_host(conv_);
    const TensorView view = host.view();
    std::vector<double> values;
    for (std::int64_t channel = 0; channel < view.shape[1]; ++channel)
      for (std::int64_t j = 0; j < layer_.shape.conv_kernel - 1; ++j)
        values.push_back(test::element(view, slot * view.stride[0] + channel * view.stride[1] + j));
    return values;
  }
  std::vector<char> bytes(int slot) const {
    std::vector<char> all;
    for (const Tensor* tensor : {&conv_, &temporal_, &replay_})
      for (const char byte : test::bits(on_host(*tensor).view().slice(slot, slot + 1))) all.push_back(byte);
    return all;
  }

  DType dtype() const { return dtype_; }

 private:
  const Layer& layer_;
  Device device_;
  int num_drafts_;
  DType dtype_;
  Tensor conv_, temporal_, replay_, conv_weight_, A_log_, dt_bias_, norm_weight_;
};

std::vector<double> flat(const std::vector<std::vector<double>>& rows) {
  std::vector<double> values;
  for (const auto& row : rows) values.insert(values.end(), row.begin(), row.end());
  return values;
}

// Three sequences whose steps visit every (tokens, accepted) pair, among padding rows that ask for snapshots; every
// third step a prompt begins in a fourth slot.
//   num_steps  0: until all pairs followed each other
void check_chain(const ops::GdnShape& shape, Layout layout, DType dtype, DType state_dtype, Device device,
                 int num_drafts, bool knows_decodes, int num_steps = 0, int num_padding = 2) {
  CAPTURE(shape.num_value_heads);
  CAPTURE(shape.key_head_dim);
  CAPTURE(name(dtype));
  CAPTURE(name(state_dtype));
  CAPTURE(num_drafts);
  CAPTURE(device.type == DeviceType::cuda);
  constexpr int kSeqs = 3, kPromptSlot = 3, kSnapshotSlot = 4, kUnused = 5, kNumSlots = 6, kRight = 150, kTokens = 300;
  const Layer layer(shape, layout, dtype, state_dtype, kTokens, 1);
  const Runner runner(layer, device, kNumSlots, num_drafts);
  const auto untouched = runner.bytes(kUnused);
  // Roundings of the state add up over the tokens, one or two each.
  const auto is_near = [&](const std::vector<double>& got, const std::vector<double>& expected, int num_tokens) {
    const bool is_f32 = runner.dtype() == DType::f32;
    const double state_units =
        state_dtype == DType::f32 ? 0.0 : test::unit_roundoff(state_dtype) * std::sqrt(1.0 + num_tokens);
    const double error = relative_error(got, expected);
    // f16 and bf16: results of the convolution, the rule and the norm, and prompts in chunks of bf16.
    const double units = is_f32 ? 1e-5 : 3.0 * test::unit_roundoff(dtype) + 1.5 * test::unit_roundoff(DType::bf16);
    CAPTURE(error);
    CHECK(error <= units + 2.0 * state_units);
  };

  std::vector<std::pair<int, int>> pairs;  // tokens of a step, accepted ones
  for (int q = 1; q <= 1 + num_drafts; ++q)
    for (int a = 1; a <= q; ++a) pairs.emplace_back(q, a);
  const int num_pairs = static_cast<int>(pairs.size());
  if (num_steps == 0) num_steps = num_pairs + 3;

  std::vector<Stream> streams(kSeqs, Stream(layer));
  std::vector<int> next(kSeqs), accepted(kSeqs, 1);
  std::vector<ops::InitialState> initial(kSeqs, ops::InitialState::slot);
  std::vector<Row> prompts;
  for (int i = 0; i < kSeqs; ++i) {
    Row prompt{.slot = i, .initial = ops::InitialState::zero, .tokens = {}};
    for (int t = 0; t < 2 + i; ++t) prompt.tokens.push_back(t);
    next[i] = 2 + i;
    prompts.push_back(prompt);
    for (const std::int64_t token : prompt.tokens) streams[i].next(token);
  }
  runner.step(prompts, 0);

  int wrong = kRight;
  for (int step = 0; step < num_steps; ++step) {
    CAPTURE(step);
    const Row padding{.slot = -1,
                      .num_accepted = 1,
                      .initial = ops::InitialState::replay,
                      .tokens = {0},
                      .snapshot_slot = kUnused,
                      .snapshot_offset = 0};
    std::vector<Row> rows{padding};
    std::vector<int> accepts;
    for (int i = 0; i < kSeqs; ++i) {
      // Sequence 1 takes the pairs backwards: they meet in other orders.
      const int index = (i == 1 ? 7 * num_pairs - step : step + i * (1 + num_pairs / 2)) % num_pairs;
      const auto [num_tokens, num_accepted] = pairs[static_cast<std::size_t>(index)];
      Row row{.slot = i, .num_accepted = accepted[i], .initial = initial[i], .tokens = {}};
      for (int t = 0; t < num_tokens; ++t) {
        row.tokens.push_back(t < num_accepted ? next[i] + t : wrong++);
        if (wrong == kTokens) wrong = kRight;
      }
      if (i == step % kSeqs) row.snapshot_slot = kSnapshotSlot, row.snapshot_offset = step / kSeqs % (2 + num_drafts);
      rows.push_back(row), accepts.push_back(num_accepted);
      for (int j = 1; i == 0 && j < num_padding; ++j) rows.push_back(padding);
    }
    const int num_decodes = static_cast<int>(rows.size());
    if (step % 3 == 2) {
      rows.push_back({.slot = kPromptSlot, .initial = ops::InitialState::zero, .tokens = {}});
      for (int t = 0; t < 5 + 70 * (step % 2); ++t) rows.back().tokens.push_back(t);
    }
    const auto outputs = runner.step(rows, knows_decodes ? num_decodes : 0);

    std::size_t at = 0;
    const auto width = static_cast<std::size_t>(shape.num_value_heads) * static_cast<std::size_t>(shape.value_head_dim);
    for (const Row& row : rows) {
      const auto begin = outputs.begin() + static_cast<std::ptrdiff_t>(at * width);
      at += row.tokens.size();
      if (row.slot < 0) continue;
      if (row.slot == kPromptSlot) {
        Stream prompt(layer);
        std::vector<double> expected;
        for (const std::int64_t token : row.tokens)
          for (const double value : prompt.next(token)) expected.push_back(value);
        is_near({begin, begin + static_cast<std::ptrdiff_t>(expected.size())}, expected,
                static_cast<int>(row.tokens.size()));
        is_near(runner.state(kPromptSlot), flat(prompt.states()), static_cast<int>(row.tokens.size()));
        continue;
      }
      Stream& stream = streams[row.slot];
      const auto before = flat(stream.states());
      std::vector<double> expected;
      for (int t = 0; t < accepts[row.slot]; ++t) {
        for (const double value : stream.next(row.tokens[static_cast<std::size_t>(t)])) expected.push_back(value);
        if (row.snapshot_slot < 0 || t != row.snapshot_offset) continue;
        is_near(runner.state(kSnapshotSlot), flat(stream.states()), next[row.slot]);
        CHECK(runner.inputs(kSnapshotSlot) == flat(stream.inputs()));
      }
      is_near({begin, begin + static_cast<std::ptrdiff_t>(expected.size())}, expected, next[row.slot]);
      const bool at_once = device.type == DeviceType::cpu && row.tokens.size() == 1;
      is_near(runner.state(row.slot), at_once ? flat(stream.states()) : before, next[row.slot]);
      next[row.slot] += accepts[row.slot], accepted[row.slot] = accepts[row.slot];
      initial[row.slot] = ops::InitialState::replay;
      REQUIRE(next[row.slot] < kRight);
    }
    CHECK(runner.bytes(kUnused) == untouched);
  }
}

std::vector<Device> gpus() {
  auto devices = test::devices();
  devices.erase(devices.begin());
  return devices;
}

constexpr ops::GdnShape kWide{2, 4, 128, 128, 4};

TEST_CASE("verified steps agree with one token after another in double, whatever is accepted") {
  for (const Device device : test::devices())
    for (const ops::GdnShape& shape :
         {kWide, ops::GdnShape{1, 3, 128, 128, 4}, {2, 4, 64, 64, 4}, {2, 2, 100, 65, 4}, {1, 2, 32, 40, 3}})
      for (const DType state_dtype : {DType::f32, DType::bf16})
        for (int num_drafts = 1; num_drafts <= 3; ++num_drafts)
          check_chain(shape, Layout::separate, DType::f32, state_dtype, device, num_drafts, true);
}

TEST_CASE("verified steps on a GPU agree with double in every dtype and layout") {
  for (const Device device : gpus())
    for (const ops::GdnShape& shape : {kWide, ops::GdnShape{1, 4, 128, 128, 4}, {1, 1, 128, 128, 4}, {3, 6, 16, 16, 4}})
      for (const DType dtype : test::kFloatTypes)
        for (const DType state_dtype : {DType::f32, DType::bf16})
          check_chain(shape, Layout::grouped, dtype, state_dtype, device, 3, true);
}

TEST_CASE("verified steps of more drafts than a kernel takes, and of sequences that nobody calls decodes") {
  for (const Device device : test::devices()) {
    check_chain(kWide, Layout::separate, DType::f32, DType::f32, device, 5, true);
    check_chain(kWide, Layout::separate, DType::f32, DType::f32, device, 2, false);
    if (device.type == DeviceType::cuda) check_chain(kWide, Layout::separate, DType::bf16, DType::f32, device, 5, true);
  }
}

constexpr int kManySeqs = 60;  // for which a GPU has other kernels

TEST_CASE("verified steps of many sequences") {
  for (const Device device : test::devices())
    for (const ops::GdnShape& shape : {kWide, ops::GdnShape{1, 3, 128, 128, 4}, {1, 1, 128, 128, 4}})
      for (const DType dtype : test::kFloatTypes)
        for (const DType state_dtype : {DType::f32, DType::bf16})
          if (device.type == DeviceType::cuda || dtype == DType::f32)
            check_chain(shape, Layout::grouped, dtype, state_dtype, device, 3, true, 0, kManySeqs);
}

TEST_CASE("a few verified steps on a GPU [sanitizer]") {
  for (const Device device : gpus())
    for (const ops::GdnShape& shape : {kWide, ops::GdnShape{1, 3, 128, 128, 4}, {2, 2, 20, 37, 3}})
      for (const DType dtype : {DType::f32, DType::bf16})
        for (const int num_padding : {2, kManySeqs})
          check_chain(shape, Layout::separate, dtype, DType::f32, device, 3, true, 3, num_padding);
}

}  // namespace
}  // namespace deltaic

#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "tests_cpp/ops/gdn_layer.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

using namespace gdn_test;
using Ints = std::vector<std::int32_t>;
using Flags = std::vector<std::uint8_t>;

// The sequences of a step.
struct Step {
  Ints start, slots;
  Flags has_state;
  int num_decodes = 0;
};

struct Result {
  Tensor out, conv_state, temporal;
};

// Runs the mixer on copies. The CPU computes in f32 from the same numbers. Indices lie 3 apart, what is between is not
// to be read.
Result run(const Layer& layer, const Step& step, Device device, const Result* from = nullptr, std::int64_t first = 0,
           std::int64_t last = -1) {
  const bool is_cpu = device.type == DeviceType::cpu;
  const auto widened = [&](const Tensor& tensor) {
    if (!is_cpu || tensor.view().dtype == DType::f32) return on_device(tensor, device);
    const TensorView& view = tensor.view();
    Tensor wide(DType::f32, std::span<const std::int64_t>(view.shape.data(), static_cast<std::size_t>(view.rank)));
    for (std::int64_t i = 0; i < view.numel(); ++i) wide.as<float>()[i] = static_cast<float>(test::element(view, i));
    return wide;
  };
  if (last < 0) last = layer.num_tokens;
  const ops::GdnShape& shape = layer.shape;
  const Tensor proj = widened(layer.proj);
  const TensorView tokens = proj.view().slice(first, last);
  Result result{.out = Tensor(tokens.dtype, {last - first, shape.num_value_heads, shape.value_head_dim}, device),
                .conv_state = widened(from != nullptr ? from->conv_state : layer.conv_state),
                .temporal = widened(from != nullptr ? from->temporal : layer.temporal)};
  const std::int64_t num_seqs = static_cast<std::int64_t>(step.slots.size());
  Ints strided(static_cast<std::size_t>(num_seqs) * 3, 1 << 30);
  for (std::int64_t i = 0; i < num_seqs; ++i) strided[i * 3] = step.slots[i];
  const Tensor start = on_device(test::ints(step.start), device), slots = on_device(test::ints(strided), device),
               has_state = on_device(test::bytes(step.has_state), device);
  TensorView indices = slots.view();
  indices.shape[0] = num_seqs, indices.stride[0] = 3;
  const auto num_bytes = ops::gdn_mixer_workspace_bytes(device, shape, tokens.dtype, tokens.shape[0], num_seqs);
  Tensor workspace(DType::u8, {static_cast<std::int64_t>(num_bytes)}, device);
  const Tensor nan_out = test::filled({result.out.view().numel()}, tokens.dtype, NAN);
  if (is_cpu)
    std::memset(result.out.view().data, 0, result.out.view().num_bytes());
  else
    cuda::copy_and_wait(result.out.view().data, nan_out.view().data, nan_out.view().num_bytes());
  const Tensor conv_weight = on_device(layer.conv_weight, device), A_log = on_device(layer.A_log, device),
               dt_bias = on_device(layer.dt_bias, device), norm_weight = on_device(layer.norm_weight, device);
  ops::Context ctx = test::cpu_context();
  ctx.device = device;
  ops::gdn_mixer(ctx, {.shape = shape,
                       .layout = layer.layout,
                       .proj = tokens,
                       .conv_weight = conv_weight.view(),
                       .A_log = A_log.view(),
                       .dt_bias = dt_bias.view(),
                       .norm_weight = norm_weight.view(),
                       .eps = 1e-6F,
                       .sequences = {.query_start_loc = start.view(),
                                     .state_indices = indices,
                                     .has_initial_state = has_state.view(),
                                     .num_decodes = step.num_decodes},
                       .conv_state = result.conv_state.view(),
                       .temporal = result.temporal.view(),
                       .workspace = workspace.view(),
                       .out = result.out.view()});
  return {.out = on_host(result.out), .conv_state = on_host(result.conv_state), .temporal = on_host(result.temporal)};
}

std::vector<Device> gpus() {
  auto devices = test::devices();
  devices.erase(devices.begin());
  return devices;
}

// How far out and states may be from the same computed in f32, relative in norm: the result's rounding, and those of
// the factors of the chunked products, which are bf16 at best.
double limit(DType dtype, DType state_dtype, bool has_chunks) {
  double units = test::unit_roundoff(dtype) + test::unit_roundoff(state_dtype);
  if (has_chunks && dtype != DType::f32) units += 1.5 * test::unit_roundoff(DType::bf16);
  return dtype == DType::f32 && state_dtype == DType::f32 ? 1e-5 : units;
}

std::vector<double> rows_of(const Tensor& tensor, const Step& step) {
  std::vector<double> rows;
  for (std::size_t i = 0; i < step.slots.size(); ++i)
    if (step.slots[i] >= 0)
      for (const double value : test::values(tensor.view().slice(step.start[i], step.start[i + 1])))
        rows.push_back(value);
  return rows;
}
std::vector<double> slots_of(const Tensor& tensor, const Step& step) {
  std::vector<double> values;
  for (std::size_t i = 0; i < step.slots.size(); ++i)
    if (step.slots[i] >= 0 && step.start[i] < step.start[i + 1])
      for (const double value : test::values(tensor.view().slice(step.slots[i], step.slots[i] + 1)))
        values.push_back(value);
  return values;
}

void check_step(const Layer& layer, const Step& step, bool has_chunks) {
  const Result expected = run(layer, step, Device{});
  for (const Device device : gpus()) {
    const Result got = run(layer, step, device);
    const double most = limit(layer.proj.view().dtype, layer.temporal.view().dtype, has_chunks);
    CHECK(relative_error(rows_of(got.out, step), rows_of(expected.out, step)) <= most);
    CHECK(relative_error(slots_of(got.temporal, step), slots_of(expected.temporal, step)) <= most);
    CHECK(slots_of(got.conv_state, step) == slots_of(expected.conv_state, step));
    for (std::int64_t slot = 0; slot < layer.num_slots; ++slot)
      if (std::find(step.slots.begin(), step.slots.end(), slot) == step.slots.end()) {
        CHECK(test::bits(got.temporal.view().slice(slot, slot + 1)) ==
              test::bits(layer.temporal.view().slice(slot, slot + 1)));
        CHECK(test::bits(got.conv_state.view().slice(slot, slot + 1)) ==
              test::bits(layer.conv_state.view().slice(slot, slot + 1)));
      }
  }
}

TEST_CASE("gdn_mixer on a GPU agrees with the CPU for decodes, spans, padding and fresh slots [sanitizer]") {
  const ops::GdnShape shapes[] = {{2, 4, 128, 128, 4}, {1, 1, 128, 128, 4}, {1, 3, 128, 128, 4},
                                  {1, 4, 128, 128, 4}, {2, 4, 64, 64, 4},   {3, 6, 16, 16, 4},
                                  {2, 2, 100, 65, 4},  {1, 2, 32, 40, 3},   {2, 4, 128, 64, 4}};
  const Step step{.start = {0, 1, 2, 3, 4, 69, 70, 70, 200, 203},
                  .slots = {5, 11, -1, 2, 7, 3, 4, 9, -1},
                  .has_state = {1, 0, 1, 1, 1, 0, 1, 0, 1},
                  .num_decodes = 4};
  for (const ops::GdnShape& shape : shapes)
    for (const Layout layout : {Layout::separate, Layout::grouped})
      for (const DType dtype : test::kFloatTypes)
        for (const DType state_dtype : {DType::f32, DType::bf16}) {
          CAPTURE(shape.num_value_heads);
          CAPTURE(shape.key_head_dim);
          CAPTURE(shape.value_head_dim);
          CAPTURE(name(dtype));
          CAPTURE(name(state_dtype));
          CAPTURE(static_cast<int>(layout));
          const Layer layer(shape, layout, dtype, state_dtype, 203, 12);
          for (const int slot : {0, 1, 3, 6, 8, 9, 10, 11}) layer.poison(slot);  // unused, or fresh
          check_step(layer, step, true);
        }
}

TEST_CASE("many decodes stream their states, wherever padding lies") {
  for (const ops::GdnShape& shape : {ops::GdnShape{2, 4, 128, 128, 4}, {1, 4, 128, 128, 4}, {3, 3, 128, 128, 4}})
    for (const DType dtype : test::kFloatTypes)
      for (const DType state_dtype : {DType::f32, DType::bf16}) {
        CAPTURE(shape.num_value_heads);
        CAPTURE(name(dtype));
        CAPTURE(name(state_dtype));
        constexpr int kDecodes = 301;
        const Layer layer(shape, Layout::separate, dtype, state_dtype, kDecodes, 40);
        layer.poison(0);
        // Slots 2 to 38 once each, some fresh; the rest padding, in between and behind.
        Step step{.start = {0}, .slots = {}, .has_state = {}, .num_decodes = kDecodes};
        for (int i = 0; i < kDecodes; ++i) {
          const bool is_real = i % 8 == 3 && i / 8 < 37;
          step.start.push_back(i + 1), step.slots.push_back(is_real ? i / 8 + 2 : -1);
          step.has_state.push_back(i % 3 != 0);
        }
        check_step(layer, step, false);
      }
}

// The mixer in double: [tokens, heads, dv] of tokens [0, num_tokens) from nothing, and the last states.
std::vector<double> in_double(const Layer& layer, std::int64_t num_tokens, std::vector<double>& states) {
  const ops::GdnShape& s = layer.shape;
  const ops::GdnProjectionLayout& l = layer.layout;
  const std::int64_t dk = s.key_head_dim, dv = s.value_head_dim, r = s.heads_per_group();
  const auto convolved = [&](std::int64_t t, std::int64_t column, std::int64_t channel) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < s.conv_kernel; ++j)
      if (const std::int64_t from = t - s.conv_kernel + 1 + j; from >= 0)
        sum += layer.conv_weight.as<float>()[channel * s.conv_kernel + j] * layer.input(from, column);
    return reference::silu(sum);
  };
  std::vector<double> all(num_tokens * s.num_value_heads * dv);
  states.clear();
  for (std::int64_t h = 0; h < s.num_value_heads; ++h) {
    const std::int64_t g = h / r, j = h % r;
    reference::DeltaHead head;
    head.dk = static_cast<std::size_t>(dk), head.dv = static_cast<std::size_t>(dv);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t c = 0; c < dk; ++c) {
        head.q.push_back(convolved(t, l.q + g * l.q_stride + c, g * dk + c));
        head.k.push_back(convolved(t, l.k + g * l.k_stride + c, (s.num_key_heads + g) * dk + c));
      }
      for (std::int64_t c = 0; c < dv; ++c)
        head.v.push_back(convolved(t, l.v + g * l.v_group_stride + j * dv + c, 2 * s.num_key_heads * dk + h * dv + c));
      head.beta.push_back(reference::sigmoid(layer.input(t, l.b + g * l.b_group_stride + j)));
      head.g.push_back(
          -std::exp(static_cast<double>(layer.A_log.as<float>()[h])) *
          reference::softplus(layer.input(t, l.a + g * l.a_group_stride + j) + layer.dt_bias.as<float>()[h]));
    }
    std::vector<double> state(dv * dk, 0.0);
    const auto out = reference::delta_rule(head, state);
    states.insert(states.end(), state.begin(), state.end());
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      double squares = 0.0;
      for (std::int64_t c = 0; c < dv; ++c) squares += out[t * dv + c] * out[t * dv + c];
      for (std::int64_t c = 0; c < dv; ++c)
        all[(t * s.num_value_heads + h) * dv + c] =
            out[t * dv + c] / std::sqrt(squares / static_cast<double>(dv) + 1e-6) * layer.norm_weight.as<float>()[c] *
            reference::silu(layer.input(t, l.z + g * l.z_group_stride + j * dv + c));
    }
  }
  return all;
}

// The bounds of a layer in chunks, relative in norm: outputs 2 and states 2 units of bf16, at any length.
TEST_CASE("D17: chunks stay within a bound of the recurrence in double, however long") {
  for (const Device device : gpus())
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const std::int32_t num_tokens : {1, 63, 64, 65, 4096}) {
        CAPTURE(name(dtype));
        CAPTURE(num_tokens);
        const Layer layer({1, 2, 128, 128, 4}, Layout::separate, dtype, DType::f32, num_tokens, 1);
        layer.poison(0);
        const Result got = run(layer, {.start = {0, num_tokens}, .slots = {0}, .has_state = {0}}, device);
        std::vector<double> states;
        const auto expected = in_double(layer, num_tokens, states);
        const double out_error = relative_error(test::values(got.out), expected);
        const double state_error = relative_error(test::values(got.temporal), states);
        MESSAGE(name(dtype), " ", num_tokens, " tokens: out ", out_error, ", state ", state_error);
        CHECK(out_error <= 2.0 * test::unit_roundoff(DType::bf16));
        CHECK(state_error <= 2.0 * test::unit_roundoff(DType::bf16));
      }
}

// Runs all tokens as one sequence, split in chunks, in slot 0. One-token chunks are decodes.
Result run_in_chunks(const Layer& layer, const Ints& chunks, Device device) {
  Result state{.out = Tensor(layer.proj.view().dtype,
                             {layer.num_tokens, layer.shape.num_value_heads, layer.shape.value_head_dim}),
               .conv_state = test::copy_of(layer.conv_state),
               .temporal = test::copy_of(layer.temporal)};
  std::int32_t begin = 0;
  for (const std::int32_t chunk : chunks) {
    Result part = run(layer,
                      {.start = {0, chunk},
                       .slots = {0},
                       .has_state = {static_cast<std::uint8_t>(begin > 0)},
                       .num_decodes = chunk == 1 ? 1 : 0},
                      device, &state, begin, begin + chunk);
    const TensorView to = state.out.view().slice(begin, begin + chunk);
    std::memcpy(to.data, part.out.view().data, to.num_bytes());
    state.conv_state = std::move(part.conv_state), state.temporal = std::move(part.temporal);
    begin += chunk;
  }
  REQUIRE(begin == layer.num_tokens);
  return state;
}

void check_splits(const ops::GdnShape& shape, DType dtype, const Ints& chunks, Device device) {
  CAPTURE(chunks[0]);
  CAPTURE(name(dtype));
  std::int32_t num_tokens = 0;
  for (const std::int32_t chunk : chunks) num_tokens += chunk;
  const Layer layer(shape, Layout::separate, dtype, DType::f32, num_tokens, 1);
  layer.poison(0);
  const Result whole = run_in_chunks(layer, {num_tokens}, device), parts = run_in_chunks(layer, chunks, device);
  CHECK(test::bits(parts.conv_state) == test::bits(whole.conv_state));
  if (dtype == DType::f32 && shape.key_head_dim != 128) {  // token by token
    CHECK(test::bits(parts.out) == test::bits(whole.out));
    CHECK(test::bits(parts.temporal) == test::bits(whole.temporal));
  } else {
    // Each is within 2 units of the recurrence (D17).
    const double most = dtype == DType::f32 ? 1e-5 : 4.0 * test::unit_roundoff(DType::bf16);
    CHECK(relative_error(test::values(parts.out), test::values(whole.out)) <= most);
    CHECK(relative_error(test::values(parts.temporal), test::values(whole.temporal)) <= most);
  }
}

TEST_CASE("D18, D19: splits that are no multiple of anything give the same, and so does a last token alone") {
  for (const Device device : gpus())
    for (const ops::GdnShape& shape : {ops::GdnShape{1, 2, 128, 128, 4}, {2, 2, 20, 37, 4}})
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const Ints& chunks : {Ints{16, 2, 8, 13}, {270, 88, 212, 203}, {63, 1, 64, 65}})
          check_splits(shape, dtype, chunks, device);
        for (const std::int32_t num_tokens : {2, 63, 64, 65, 127, 128, 129})
          check_splits(shape, dtype, {num_tokens - 1, 1}, device);
      }
}

TEST_CASE("D22: 65,537 tokens are finite and the same in two chunks") {
  for (const Device device : gpus()) {
    check_splits({1, 1, 16, 16, 4}, DType::f32, {61000, 4537}, device);
    check_splits({1, 1, 128, 128, 4}, DType::bf16, {61000, 4537}, device);
  }
}

TEST_CASE("a span has the same bits alone and batched") {
  for (const Device device : gpus()) {
    const Layer layer({1, 4, 128, 128, 4}, Layout::grouped, DType::bf16, DType::f32, 400, 3);
    const Result batch = run(layer, {.start = {0, 77, 78, 400}, .slots = {2, 0, 1}, .has_state = {0, 1, 1}}, device);
    const Result alone = run(layer, {.start = {0, 322}, .slots = {1}, .has_state = {1}}, device, nullptr, 78, 400);
    CHECK(test::bits(batch.out.view().slice(78, 400)) == test::bits(alone.out));
    CHECK(test::bits(batch.temporal.view().slice(1, 2)) == test::bits(alone.temporal.view().slice(1, 2)));
  }
}

TEST_CASE("gdn_mixer on the CPU is its three ops") {
  for (const Layout kind : {Layout::separate, Layout::grouped}) {
    const Layer layer({2, 4, 32, 24, 4}, kind, DType::f32, DType::f32, 70, 2);
    const Result got = run(layer, {.start = {0, 70}, .slots = {1}, .has_state = {0}}, Device{});
    std::vector<double> states;
    const auto expected = in_double(layer, 70, states);
    CHECK(relative_error(test::values(got.out), expected) <= 1e-5);
    CHECK(relative_error(test::values(got.temporal.view().slice(1, 2)), states) <= 1e-5);
  }
}

TEST_CASE("gdn_mixer refuses more decodes than sequences") {
  const Layer layer({1, 2, 16, 16, 4}, Layout::separate, DType::f32, DType::f32, 2, 1);
  CHECK_THROWS_WITH_AS(run(layer, {.start = {0, 2}, .slots = {0}, .has_state = {0}, .num_decodes = 2}, Device{}),
                       "gdn_mixer: num_decodes is 2, there are 1 sequences and 2 tokens", InvalidArgument);
}

}  // namespace
}  // namespace deltaic

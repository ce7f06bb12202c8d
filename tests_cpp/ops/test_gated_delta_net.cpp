#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstring>

#include <deltaic/error.h>

#include "cpp/src/ops/gated_delta_net.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

enum class Layout { separate, grouped };

// A GDN layer's weights and the projections of num_tokens tokens, all random.
struct Gdn {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  std::int64_t row = 0, num_tokens = 0;
  Tensor proj, conv_weight, A_log, dt_bias;

  Gdn(ops::GdnShape s, Layout kind, std::int64_t tokens, double a_limit = 3.0) : shape(s), num_tokens(tokens) {
    const std::int64_t dk = s.key_head_dim, dv = s.value_head_dim, r = s.heads_per_group(), g = s.num_key_heads;
    const std::int64_t q = g * dk, v = s.num_value_heads * dv;
    if (kind == Layout::separate) {
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
    } else {
      const std::int64_t group = 2 * dk + 2 * r * dv, ba = g * group;
      layout = {.q = 0,
                .q_stride = group,
                .k = dk,
                .k_stride = group,
                .v = 2 * dk,
                .v_group_stride = group,
                .z = 2 * dk + r * dv,
                .z_group_stride = group,
                .b = ba,
                .b_group_stride = 2 * r,
                .a = ba + r,
                .a_group_stride = 2 * r};
    }
    row = 2 * q + 2 * v + 2 * s.num_value_heads + 1;
    proj = test::random({tokens, row}, DType::f32, 1, 2.0);
    conv_weight = test::random({s.conv_dim(), s.conv_kernel}, DType::f32, 2);
    A_log = test::random({s.num_value_heads}, DType::f32, 3);
    dt_bias = test::random({s.num_value_heads}, DType::f32, 4);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < s.num_value_heads; ++h)
        proj.as<float>()[t * row + a_at(h)] *= static_cast<float>(a_limit);
  }

  std::int64_t a_at(std::int64_t h) const {
    return layout.a + h / shape.heads_per_group() * layout.a_group_stride + h % shape.heads_per_group();
  }
  std::int64_t b_at(std::int64_t h) const {
    return layout.b + h / shape.heads_per_group() * layout.b_group_stride + h % shape.heads_per_group();
  }
  std::int64_t channel_at(std::int64_t c) const {
    const std::int64_t dk = shape.key_head_dim, dv = shape.value_head_dim, q = shape.num_key_heads * dk;
    if (c < q) return layout.q + c / dk * layout.q_stride + c % dk;
    if (c < 2 * q) return layout.k + (c - q) / dk * layout.k_stride + (c - q) % dk;
    const std::int64_t group = shape.heads_per_group() * dv;
    return layout.v + (c - 2 * q) / group * layout.v_group_stride + (c - 2 * q) % group;
  }
  double input(std::int64_t t, std::int64_t at) const { return proj.as<float>()[t * row + at]; }

  Tensor states(std::int64_t num_slots, DType dtype, double value) const {
    return test::filled({num_slots, shape.num_value_heads, shape.value_head_dim, shape.key_head_dim}, dtype, value);
  }
  Tensor conv_states(std::int64_t num_slots, DType dtype, double value) const {
    return test::filled({num_slots, shape.conv_dim(), shape.conv_kernel + 1}, dtype, value);
  }

  // Runs tokens [start[i], start[i + 1]) of proj as sequence i; returns what the two ops give for all rows.
  struct Output {
    Tensor conv, out;
  };
  Output run(const std::vector<std::int32_t>& start, const std::vector<std::int32_t>& slots,
             const std::vector<std::uint8_t>& has_state, const Tensor& conv_state, const Tensor& temporal) const {
    const Tensor indices = test::ints(slots);
    return run_at(start, indices.view(), has_state, conv_state, temporal, proj.view());
  }
  // The same with any view of the slots, and of projections with the values of proj.
  Output run_at(const std::vector<std::int32_t>& start, const TensorView& slots,
                const std::vector<std::uint8_t>& has_state, const Tensor& conv_state, const Tensor& temporal,
                const TensorView& rows) const {
    const Tensor loc = test::ints(start), initial = test::bytes(has_state);
    const ops::GdnSequences sequences{
        .query_start_loc = loc.view(), .state_indices = slots, .has_initial_state = initial.view()};
    Output output{.conv = test::filled({num_tokens, shape.conv_dim()}, DType::f32, 77.0),
                  .out = test::filled({num_tokens, shape.num_value_heads, shape.value_head_dim}, DType::f32, 77.0)};
    ops::causal_conv(test::cpu_context(), shape, layout, rows, conv_weight.view(), sequences, conv_state.view(),
                     output.conv.view());
    ops::gated_delta_rule(test::cpu_context(), shape, layout, output.conv.view(), rows, A_log.view(), dt_bias.view(),
                          sequences, temporal.view(), /*replay=*/{}, output.out.view());
    return output;
  }

  // The convolution of tokens [begin, end) with nothing before them.
  reference::Values convolved(std::int64_t begin, std::int64_t end) const {
    reference::Values out;
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t c = 0; c < shape.conv_dim(); ++c) {
        double sum = 0.0;
        for (std::int64_t j = 0; j < shape.conv_kernel; ++j) {
          const std::int64_t from = t - shape.conv_kernel + 1 + j;
          if (from >= begin) sum += conv_weight.as<float>()[c * shape.conv_kernel + j] * input(from, channel_at(c));
        }
        out.push_back(reference::silu(sum));
      }
    return out;
  }

  // Head h of tokens [begin, end), from what the convolution gave for them.
  reference::DeltaHead head(std::int64_t h, std::int64_t begin, std::int64_t end, const reference::Values& conv) const {
    const std::int64_t dk = shape.key_head_dim, dv = shape.value_head_dim, q = shape.num_key_heads * dk;
    const std::int64_t g = h / shape.heads_per_group();
    reference::DeltaHead result;
    result.dk = static_cast<std::size_t>(dk), result.dv = static_cast<std::size_t>(dv);
    for (std::int64_t t = begin; t < end; ++t) {
      const double* m = conv.data() + (t - begin) * shape.conv_dim();
      result.q.insert(result.q.end(), m + g * dk, m + (g + 1) * dk);
      result.k.insert(result.k.end(), m + q + g * dk, m + q + (g + 1) * dk);
      result.v.insert(result.v.end(), m + 2 * q + h * dv, m + 2 * q + (h + 1) * dv);
      result.beta.push_back(reference::sigmoid(input(t, b_at(h))));
      result.g.push_back(-std::exp(static_cast<double>(A_log.as<float>()[h])) *
                         reference::softplus(input(t, a_at(h)) + dt_bias.as<float>()[h]));
    }
    return result;
  }

  // All heads of tokens [begin, end) from a zero state: [tokens, heads, dv] and the final [heads, dv, dk].
  reference::Values expected(std::int64_t begin, std::int64_t end, reference::Values& final_state) const {
    const auto conv = convolved(begin, end);
    const std::size_t heads = shape.num_value_heads, dv = shape.value_head_dim, dk = shape.key_head_dim;
    reference::Values all((end - begin) * heads * dv);
    final_state.clear();
    for (std::size_t h = 0; h < heads; ++h) {
      reference::Values state(dv * dk, 0.0);
      const auto out = reference::delta_rule(head(h, begin, end, conv), state);
      for (std::int64_t t = 0; t < end - begin; ++t)
        std::copy_n(out.begin() + t * dv, dv, all.begin() + (t * heads + h) * dv);
      final_state.insert(final_state.end(), state.begin(), state.end());
    }
    return all;
  }
};

double tolerance(const ops::GdnShape& shape) {
  // Errors of an l2 norm and of two dots over key_head_dim, carried along by a state that contracts.
  return 8.0 * test::tolerance(DType::f32, shape.key_head_dim);
}

const ops::GdnShape kShapes[] = {
    {1, 1, 1, 1, 1},   {2, 2, 16, 16, 4},   {1, 4, 64, 33, 4},  {2, 6, 7, 5, 2},
    {3, 6, 32, 40, 3}, {1, 2, 128, 128, 4}, {2, 2, 100, 65, 4}, {1, 1, 256, 20, 4},
};

TEST_CASE("causal_conv and gated_delta_rule agree with the reference in both layouts") {
  for (const ops::GdnShape& shape : kShapes)
    for (const Layout layout : {Layout::separate, Layout::grouped})
      for (const std::int32_t num_tokens : {1, 2, 3, 50}) {
        CAPTURE(shape.key_head_dim);
        CAPTURE(shape.value_head_dim);
        CAPTURE(num_tokens);
        CAPTURE(int(layout));
        const Gdn gdn(shape, layout, num_tokens);
        const Tensor conv_state = gdn.conv_states(3, DType::f32, NAN), temporal = gdn.states(3, DType::f32, NAN);
        const auto output = gdn.run({0, num_tokens}, {1}, {0}, conv_state, temporal);
        CHECK(test::max_error(test::values(output.conv), gdn.convolved(0, num_tokens)) <=
              test::tolerance(DType::f32, shape.conv_kernel));
        reference::Values final_state;
        const auto expected = gdn.expected(0, num_tokens, final_state);
        CHECK(test::max_error(test::values(output.out), expected) <= tolerance(shape));
        CHECK(test::max_error(test::values(temporal.view().slice(1, 2)), final_state) <= tolerance(shape));
        // The conv state: the last inputs, oldest first, zeros before the first token.
        for (std::int64_t c = 0; c < shape.conv_dim(); ++c)
          for (int j = 0; j < shape.conv_kernel - 1; ++j) {
            const std::int64_t t = num_tokens - shape.conv_kernel + 1 + j;
            const std::int64_t at = (shape.conv_dim() + c) * (shape.conv_kernel + 1) + j;
            CHECK(conv_state.as<float>()[at] == (t < 0 ? 0.0 : gdn.input(t, gdn.channel_at(c))));
          }
      }
}

TEST_CASE("the chunked form of the delta rule is the recurrence") {
  const ops::GdnShape shape{2, 4, 32, 24, 4};
  const Gdn gdn(shape, Layout::separate, 150);
  const auto conv = gdn.convolved(0, 150);
  for (const std::size_t chunk : {1, 7, 64, 200})
    for (std::int64_t h = 0; h < 4; ++h) {
      reference::Values state(24 * 32, 0.25), chunked_state = state;
      const auto head = gdn.head(h, 0, 150, conv);
      const auto expected = reference::delta_rule(head, state);
      CHECK(test::max_error(reference::chunked_delta_rule(head, chunked_state, chunk), expected) < 1e-12);
      CHECK(test::max_error(chunked_state, state) < 1e-12);
    }
}

TEST_CASE("sequences of a batch, idle ones and padding rows keep apart") {
  const ops::GdnShape shape{2, 4, 64, 40, 4};
  const Gdn gdn(shape, Layout::grouped, 30);
  const Tensor conv_state = gdn.conv_states(6, DType::f32, NAN), temporal = gdn.states(6, DType::f32, NAN);
  const auto untouched_conv = test::bits(conv_state.view().slice(0, 2)),
             untouched = test::bits(temporal.view().slice(0, 2));
  // Tokens 0-9 in slot 4, none in slot 1, 10-24 in slot 2, 25-27 padding, 28-29 no sequence at all.
  const auto output = gdn.run({0, 10, 10, 25, 28}, {4, 1, 2, -1}, {0, 0, 0, 0}, conv_state, temporal);
  reference::Values first, second;
  auto expected = gdn.expected(0, 10, first);
  const auto rest = gdn.expected(10, 25, second);
  expected.insert(expected.end(), rest.begin(), rest.end());
  CHECK(test::max_error(test::values(output.out.view().slice(0, 25)), expected) <= tolerance(shape));
  CHECK(test::max_error(test::values(temporal.view().slice(4, 5)), first) <= tolerance(shape));
  CHECK(test::max_error(test::values(temporal.view().slice(2, 3)), second) <= tolerance(shape));
  CHECK(test::bits(conv_state.view().slice(0, 2)) == untouched_conv);
  CHECK(test::bits(temporal.view().slice(0, 2)) == untouched);
  for (const double value : test::values(output.out.view().slice(25, 30))) CHECK(value == 77.0);
  for (const double value : test::values(output.conv.view().slice(25, 30))) CHECK(value == 77.0);
}

TEST_CASE("a fresh prompt of one token never inherits a slot's old content") {
  const Gdn gdn({1, 2, 64, 64, 4}, Layout::separate, 1);
  for (const DType dtype : test::kFloatTypes) {
    const Tensor conv_state = gdn.conv_states(1, dtype, NAN), temporal = gdn.states(1, dtype, NAN);
    const auto dirty = gdn.run({0, 1}, {0}, {0}, conv_state, temporal);
    const Tensor clean_conv = gdn.conv_states(1, dtype, 0.0), clean_temporal = gdn.states(1, dtype, 0.0);
    const auto clean = gdn.run({0, 1}, {0}, {1}, clean_conv, clean_temporal);
    CHECK(test::bits(dirty.out) == test::bits(clean.out));
    CHECK(test::bits(dirty.conv) == test::bits(clean.conv));
    CHECK(test::bits(temporal) == test::bits(clean_temporal));
  }
}

// Runs the tokens of a Gdn as one sequence in slot 0, split in chunks.
Gdn::Output run_in_chunks(const Gdn& gdn, const std::vector<std::int32_t>& chunks, const Tensor& conv_state,
                          const Tensor& temporal) {
  Gdn::Output all{.conv = Tensor(DType::f32, {gdn.num_tokens, gdn.shape.conv_dim()}),
                  .out = Tensor(DType::f32, {gdn.num_tokens, gdn.shape.num_value_heads, gdn.shape.value_head_dim})};
  std::int32_t begin = 0;
  for (const std::int32_t chunk : chunks) {
    const auto part =
        gdn.run({begin, begin + chunk}, {0}, {static_cast<std::uint8_t>(begin > 0)}, conv_state, temporal);
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      const TensorView rows = from.view().slice(begin, begin + chunk);
      std::memcpy(to.view().slice(begin, begin + chunk).data, rows.data, rows.num_bytes());
    };
    copy(part.conv, all.conv), copy(part.out, all.out);
    begin += chunk;
  }
  REQUIRE(begin == gdn.num_tokens);
  return all;
}

TEST_CASE("D19: chunk starts that are no multiple of anything give the same bits") {
  for (const ops::GdnShape& shape : {ops::GdnShape{1, 2, 128, 128, 4}, {2, 2, 20, 37, 4}})
    for (const std::vector<std::int32_t>& chunks :
         {std::vector<std::int32_t>{16, 2, 8, 13}, {270, 88, 212, 203}, {63, 1, 64, 65}}) {
      CAPTURE(chunks[0]);
      CAPTURE(shape.key_head_dim);
      std::int32_t num_tokens = 0;
      for (const std::int32_t chunk : chunks) num_tokens += chunk;
      const Gdn gdn(shape, Layout::separate, num_tokens);
      const Tensor conv_whole = gdn.conv_states(1, DType::f32, NAN), whole_state = gdn.states(1, DType::f32, NAN);
      const Tensor conv_parts = gdn.conv_states(1, DType::f32, NAN), parts_state = gdn.states(1, DType::f32, NAN);
      const auto whole = run_in_chunks(gdn, {num_tokens}, conv_whole, whole_state);
      const auto parts = run_in_chunks(gdn, chunks, conv_parts, parts_state);
      CHECK(test::bits(parts.conv) == test::bits(whole.conv));
      CHECK(test::bits(parts.out) == test::bits(whole.out));
      CHECK(test::bits(parts_state) == test::bits(whole_state));
    }
}

TEST_CASE("D18: T tokens give the state of T - 1 tokens and one more") {
  for (const std::int32_t num_tokens : {2, 63, 64, 65, 127, 128, 129}) {
    CAPTURE(num_tokens);
    const Gdn gdn({2, 4, 64, 32, 4}, Layout::grouped, num_tokens);
    const Tensor conv_whole = gdn.conv_states(1, DType::f32, NAN), whole_state = gdn.states(1, DType::f32, NAN);
    const Tensor conv_parts = gdn.conv_states(1, DType::f32, NAN), parts_state = gdn.states(1, DType::f32, NAN);
    const auto whole = run_in_chunks(gdn, {num_tokens}, conv_whole, whole_state);
    const auto parts = run_in_chunks(gdn, {num_tokens - 1, 1}, conv_parts, parts_state);
    CHECK(test::bits(parts.out) == test::bits(whole.out));
    CHECK(test::bits(conv_parts) == test::bits(conv_whole));
    CHECK(test::bits(parts_state) == test::bits(whole_state));
  }
}

TEST_CASE("a sequence has the same bits alone and batched") {
  const Gdn gdn({1, 4, 64, 48, 4}, Layout::separate, 60);
  const Tensor conv_batch = gdn.conv_states(3, DType::f32, NAN), state_batch = gdn.states(3, DType::f32, NAN);
  const auto batch = gdn.run({0, 20, 21, 60}, {2, 0, 1}, {0, 0, 0}, conv_batch, state_batch);
  const Tensor conv_alone = gdn.conv_states(1, DType::f32, NAN), state_alone = gdn.states(1, DType::f32, NAN);
  const auto alone = gdn.run({21, 60}, {0}, {0}, conv_alone, state_alone);
  CHECK(test::bits(batch.out.view().slice(21, 60)) == test::bits(alone.out.view().slice(21, 60)));
  CHECK(test::bits(state_batch.view().slice(1, 2)) == test::bits(state_alone));
}

TEST_CASE("D12: state indices may be a column of a table") {
  const Gdn gdn({2, 4, 16, 16, 4}, Layout::separate, 9);
  const Tensor table = test::ints({2, 7, 7, 0, 7, 7, 1, 7, 7});
  TensorView column = table.view();
  column.shape[0] = 3, column.stride[0] = 3;
  const Tensor conv_state = gdn.conv_states(3, DType::f32, 0.5), temporal = gdn.states(3, DType::f32, 0.25);
  const Tensor conv_expected = gdn.conv_states(3, DType::f32, 0.5), expected_state = gdn.states(3, DType::f32, 0.25);
  const auto expected = gdn.run({0, 4, 5, 9}, {2, 0, 1}, {1, 0, 1}, conv_expected, expected_state);
  const auto strided = gdn.run_at({0, 4, 5, 9}, column, {1, 0, 1}, conv_state, temporal, gdn.proj.view());
  CHECK(test::bits(strided.out) == test::bits(expected.out));
  CHECK(test::bits(conv_state) == test::bits(conv_expected));
  CHECK(test::bits(temporal) == test::bits(expected_state));
}

TEST_CASE("D13: rows with 4, 2, 1 and 3 new tokens each give what they give alone") {
  const Gdn gdn({2, 4, 32, 16, 4}, Layout::grouped, 10);
  const std::vector<std::int32_t> start{0, 4, 6, 7, 10};
  const Tensor conv_batch = gdn.conv_states(4, DType::f32, 0.5), state_batch = gdn.states(4, DType::f32, 0.25);
  const auto batch = gdn.run(start, {3, 1, 0, 2}, {1, 1, 1, 1}, conv_batch, state_batch);
  const std::vector<std::int32_t> slots{3, 1, 0, 2};
  for (std::size_t i = 0; i < slots.size(); ++i) {
    CAPTURE(i);
    const Tensor conv_alone = gdn.conv_states(1, DType::f32, 0.5), state_alone = gdn.states(1, DType::f32, 0.25);
    const auto alone = gdn.run({start[i], start[i + 1]}, {0}, {1}, conv_alone, state_alone);
    CHECK(test::bits(batch.out.view().slice(start[i], start[i + 1])) ==
          test::bits(alone.out.view().slice(start[i], start[i + 1])));
    CHECK(test::bits(state_batch.view().slice(slots[i], slots[i] + 1)) == test::bits(state_alone));
    CHECK(test::bits(conv_batch.view().slice(slots[i], slots[i] + 1)) == test::bits(conv_alone));
  }
}

// Rows so far apart that the third begins 2^31 elements into the tensor; only the pages that hold rows exist.
TEST_CASE("D11: a token's row offset passes 2^31 elements") {
  Gdn gdn({1, 2, 16, 16, 4}, Layout::separate, 3);
  constexpr std::int64_t kStride = (std::int64_t{1} << 30) + 64;
  const auto num_bytes = static_cast<std::size_t>(2 * kStride + gdn.row) * sizeof(float);
  void* mapping = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(mapping != MAP_FAILED);
  TensorView far = make_view(mapping, DType::f32, {3, gdn.row});
  far.stride[0] = kStride;
  for (std::int64_t t = 0; t < 3; ++t)
    std::memcpy(far.slice(t, t + 1).data, gdn.proj.view().slice(t, t + 1).data,
                static_cast<std::size_t>(gdn.row) * sizeof(float));
  const Tensor conv_state = gdn.conv_states(1, DType::f32, NAN), temporal = gdn.states(1, DType::f32, NAN);
  const Tensor conv_expected = gdn.conv_states(1, DType::f32, NAN), expected_state = gdn.states(1, DType::f32, NAN);
  const auto expected = gdn.run({0, 3}, {0}, {0}, conv_expected, expected_state);
  const Tensor slots = test::ints({0});
  const auto got = gdn.run_at({0, 3}, slots.view(), {0}, conv_state, temporal, far);
  CHECK(test::bits(got.conv) == test::bits(expected.conv));
  CHECK(test::bits(got.out) == test::bits(expected.out));
  CHECK(test::bits(temporal) == test::bits(expected_state));
  // A sequence that begins there.
  const Tensor two_slots = test::ints({0, 1});
  const Tensor conv_two = gdn.conv_states(2, DType::f32, NAN), two = gdn.states(2, DType::f32, NAN);
  const Tensor conv_two_near = gdn.conv_states(2, DType::f32, NAN), two_near = gdn.states(2, DType::f32, NAN);
  const auto near_out = gdn.run({0, 2, 3}, {0, 1}, {0, 0}, conv_two_near, two_near);
  const auto far_out = gdn.run_at({0, 2, 3}, two_slots.view(), {0, 0}, conv_two, two, far);
  CHECK(test::bits(far_out.conv) == test::bits(near_out.conv));
  CHECK(test::bits(far_out.out) == test::bits(near_out.out));
  CHECK(test::bits(two) == test::bits(two_near));
  munmap(mapping, num_bytes);
}

TEST_CASE("states in f16 and bf16 are rounded once, at the end of a span") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const ops::GdnShape shape{1, 2, 64, 24, 4};
    const Gdn gdn(shape, Layout::separate, 40);
    const Tensor conv_state = gdn.conv_states(1, DType::f32, NAN), temporal = gdn.states(1, dtype, NAN);
    const Tensor conv_exact = gdn.conv_states(1, DType::f32, NAN), exact = gdn.states(1, DType::f32, NAN);
    const auto rounded = gdn.run({0, 40}, {0}, {0}, conv_state, temporal);
    const auto full = gdn.run({0, 40}, {0}, {0}, conv_exact, exact);
    CHECK(test::bits(rounded.out) == test::bits(full.out));
    int wrong = 0;
    for (std::int64_t i = 0; i < exact.view().numel(); ++i)
      wrong += temporal.as<std::uint16_t>()[i] != test::to_16_bits(exact.as<float>()[i], dtype);
    CHECK(wrong == 0);
  }
}

// With k = v = beta-free rows the gates can be read off: one token, state S = 1 e_0, q = k = e_0.
TEST_CASE("D15, D16: decay and beta agree with double for 10^4 random inputs, softplus linear above 20") {
  const ops::GdnShape shape{1, 1, 1, 1, 1};
  const ops::GdnProjectionLayout layout{.q = 0,
                                        .q_stride = 1,
                                        .k = 1,
                                        .k_stride = 1,
                                        .v = 2,
                                        .v_group_stride = 1,
                                        .z = 0,
                                        .z_group_stride = 1,
                                        .b = 3,
                                        .b_group_stride = 1,
                                        .a = 4,
                                        .a_group_stride = 1};
  const std::int32_t n = 10000;
  std::mt19937 engine(5);
  std::uniform_real_distribution<float> uniform(-60.0F, 60.0F);
  for (const float A_log_value : {-6.0F, -1.2345678F, 0.3F}) {
    Tensor qkv(DType::f32, {n, 3}), proj(DType::f32, {n, 5}), temporal = test::filled({n, 1, 1, 1}, DType::f32, 1.0);
    std::vector<std::int32_t> start(n + 1), slots(n);
    for (std::int32_t i = 0; i < n; ++i) {
      start[i + 1] = i + 1, slots[i] = i;
      const bool reads_decay = i % 2 == 0;  // v = 0, k = 0: S becomes decay; else S starts at 0 and becomes beta
      qkv.as<float>()[3 * i] = 1.0F;
      qkv.as<float>()[3 * i + 1] = reads_decay ? 0.0F : 1e6F;
      qkv.as<float>()[3 * i + 2] = reads_decay ? 0.0F : 1.0F;
      proj.as<float>()[5 * i + 3] = uniform(engine);
      proj.as<float>()[5 * i + 4] = uniform(engine) * (i % 4 == 0 ? 1.0F : 0.2F);
      if (!reads_decay) temporal.as<float>()[i] = 0.0F;
    }
    const Tensor A_log = test::filled({1}, DType::f32, A_log_value), dt_bias = test::filled({1}, DType::f32, 0.7);
    const Tensor loc = test::ints(start), indices = test::ints(slots),
                 initial = test::bytes(std::vector<std::uint8_t>(n, 1));
    Tensor out(DType::f32, {n, 1, 1});
    ops::gated_delta_rule(
        test::cpu_context(), shape, layout, qkv.view(), proj.view(), A_log.view(), dt_bias.view(),
        {.query_start_loc = loc.view(), .state_indices = indices.view(), .has_initial_state = initial.view()},
        temporal.view(), /*replay=*/{}, out.view());
    double worst_decay = 0.0, worst_beta = 0.0;
    for (std::int32_t i = 0; i < n; ++i) {
      const double a = proj.as<float>()[5 * i + 4], b = proj.as<float>()[5 * i + 3], got = temporal.as<float>()[i];
      const double g =
          -std::exp(static_cast<double>(A_log.as<float>()[0])) * reference::softplus(a + dt_bias.as<float>()[0]);
      const double wanted = i % 2 == 0 ? std::exp(g) : reference::sigmoid(b);
      double& worst = i % 2 == 0 ? worst_decay : worst_beta;
      if (wanted > 1e-37) worst = std::max(worst, std::fabs(got - wanted) / wanted);
    }
    CHECK(worst_decay < 1e-6);
    CHECK(worst_beta < 1e-6);
  }
}

TEST_CASE("decays of exp(-1300) do not overflow, and a zero key divides by the root of 1e-6") {
  const ops::GdnShape shape{1, 1, 64, 16, 2};
  Gdn gdn(shape, Layout::separate, 5);
  gdn.A_log.as<float>()[0] = std::log(16.0F);
  for (std::int64_t t = 0; t < 5; ++t) {
    gdn.proj.as<float>()[t * gdn.row + gdn.a_at(0)] = 81.25F;
    for (int c = 0; c < 128; ++c) gdn.proj.as<float>()[t * gdn.row + c] = 0.0F;  // q = k = 0
  }
  const Tensor conv_state = gdn.conv_states(1, DType::f32, 0.0), temporal = gdn.states(1, DType::f32, 1e30);
  const auto output = gdn.run({0, 5}, {0}, {1}, conv_state, temporal);
  for (const double value : test::values(output.out)) CHECK(value == 0.0);
  for (const double value : test::values(temporal)) CHECK(value == 0.0);
}

TEST_CASE("the l2 norm has its 1e-6 inside the root") {
  const ops::GdnShape shape{1, 1, 32, 8, 1};
  Gdn gdn(shape, Layout::separate, 3);
  for (std::int64_t t = 0; t < 3; ++t)
    for (int c = 0; c < 64; ++c) gdn.proj.as<float>()[t * gdn.row + c] *= 1e-3F;
  const Tensor conv_state = gdn.conv_states(1, DType::f32, NAN), temporal = gdn.states(1, DType::f32, NAN);
  const auto output = gdn.run({0, 3}, {0}, {0}, conv_state, temporal);
  reference::Values final_state;
  const auto expected = gdn.expected(0, 3, final_state);
  CHECK(test::max_error(test::values(output.out), expected) <= tolerance(shape));
  CHECK(test::max_error(test::values(temporal), final_state) <= tolerance(shape));
}

TEST_CASE("gated_delta_rule refuses slots and layouts that do not fit") {
  Gdn gdn({1, 2, 8, 8, 4}, Layout::separate, 2);
  const Tensor conv_state = gdn.conv_states(2, DType::f32, 0.0), temporal = gdn.states(2, DType::f32, 0.0);
  CHECK_THROWS_WITH_AS(gdn.run({0, 2}, {2}, {0}, conv_state, temporal), "sequence 0 has state slot 2, there are 2",
                       InvalidArgument);
  CHECK_THROWS_AS(gdn.run({0, 3}, {0}, {0}, conv_state, temporal), InvalidArgument);
  gdn.layout.a = 1000;
  CHECK_THROWS_AS(gdn.run({0, 2}, {0}, {0}, conv_state, temporal), InvalidArgument);
}

}  // namespace
}  // namespace deltaic

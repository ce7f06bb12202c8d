#include <doctest/doctest.h>

#include <numeric>
#include <tuple>

#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/moe.h"
#include "cuda/gemm/moe_grouped.h"
#include "cuda/gemm/moe_streaming.h"
#include "tests_cpp/support/on_device.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

const ops::Context kContext{.device = test::kGpu};

TEST_CASE("moe_router on CUDA chooses as on the CPU [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const bool renormalize : {false, true})
    for (const auto& [num_experts, k] : {std::pair{1, 1}, {5, 5}, {16, 2}, {100, 8}, {256, 8}, {512, 10}, {1000, 32}}) {
      CAPTURE(num_experts);
      CAPTURE(k);
      CAPTURE(renormalize);
      const std::int64_t num_tokens = 41;
      Tensor logits = test::random({num_tokens, num_experts}, DType::f32, 1, 8.0);
      for (std::int64_t e = 0; e < num_experts; ++e) logits.as<float>()[e] = 1.0F;  // the first token: all tie
      Tensor ids(DType::i32, {num_tokens, k}), weights(DType::f32, {num_tokens, k});
      ops::moe_router(test::cpu_context(), logits.view(), renormalize, ids.view(), weights.view());
      const Tensor dlogits = test::to_gpu(logits);
      const Tensor dids(DType::i32, {num_tokens, k}, test::kGpu);
      const Tensor dweights = test::to_gpu(test::filled({num_tokens, k}, DType::f32, NAN));
      ops::moe_router(kContext, dlogits.view(), renormalize, dids.view(), dweights.view());
      CHECK(test::bits(test::to_host(dids)) == test::bits(ids));
      CHECK(test::max_error(test::values(test::to_host(dweights)), test::values(weights)) <=
            test::tolerance(DType::f32, num_experts));
    }
}

TEST_CASE("moe_router on CUDA gives valid ids for NaN logits [sanitizer]") {
  if (!test::has_gpu()) return;
  const Tensor logits = test::to_gpu(test::filled({1, 8}, DType::f32, NAN));
  const Tensor ids(DType::i32, {1, 3}, test::kGpu), weights(DType::f32, {1, 3}, test::kGpu);
  ops::moe_router(kContext, logits.view(), true, ids.view(), weights.view());
  const Tensor got = test::to_host(ids);
  for (int j = 0; j < 3; ++j) CHECK(got.as<std::int32_t>()[j] == j);
}

struct RouteCase {
  DType dtype;
  std::int64_t num_experts, k, hidden, num_tokens;
  bool has_shared;
};

void check_route(const RouteCase& c) {
  const std::int64_t num_experts = c.num_experts, k = c.k, hidden = c.hidden, num_tokens = c.num_tokens;
  const bool has_shared = c.has_shared;
  const DType dtype = c.dtype;
  CAPTURE(name(dtype));
  CAPTURE(num_experts);
  CAPTURE(num_tokens);
  CAPTURE(has_shared);
  const std::int64_t num_columns = k + (has_shared ? 1 : 0);
  const std::int64_t num_rows = num_experts + (has_shared ? 8 : 0);  // as a Projection pads them
  const Tensor x = test::to_gpu(test::random({num_tokens, hidden}, dtype, 1));
  const Tensor router = test::to_gpu(test::random({num_rows, hidden}, dtype, 2, 0.3));
  const Tensor norm_weight = test::to_gpu(test::random({hidden}, DType::f32, 3));
  const ops::FusedNorm norm{.weight = norm_weight.view(), .eps = 1e-6F};
  struct Choice {
    Tensor ids, weights;
  };
  const auto new_choice = [&] {
    return Choice{Tensor(DType::i32, {num_tokens, num_columns}, test::kGpu),
                  test::to_gpu(test::filled({num_tokens, num_columns}, DType::f32, NAN))};
  };
  const Choice expected = new_choice(), all = new_choice(), alone = new_choice();
  const Tensor logits(DType::f32, {num_tokens, num_rows}, test::kGpu);
  ops::linear(kContext, x.view(), test::weight_of(router), {.bias = {}, .norm = norm}, logits.view());
  TensorView expert_logits = logits.view(), shared_logits{};
  expert_logits.shape[1] = num_experts;
  if (has_shared) {
    shared_logits = logits.view();
    shared_logits.data = static_cast<float*>(shared_logits.data) + num_experts;
    shared_logits.shape[1] = 1;
  }
  ops::moe_router(kContext, expert_logits, shared_logits, true, expected.ids.view(), expected.weights.view());
  ops::moe_route(kContext, x.view(), norm, test::weight_of(router), num_experts, has_shared, true, all.ids.view(),
                 all.weights.view());
  for (std::int64_t t = 0; t < num_tokens; ++t)
    ops::moe_route(kContext, x.view().slice(t, t + 1), norm, test::weight_of(router), num_experts, has_shared, true,
                   alone.ids.view().slice(t, t + 1), alone.weights.view().slice(t, t + 1));
  CHECK(test::bits(test::to_host(all.ids)) == test::bits(test::to_host(expected.ids)));
  CHECK(test::max_error(test::values(test::to_host(all.weights)), test::values(test::to_host(expected.weights))) <=
        2.0 * test::tensor_sum_tolerance(hidden, 1.0));
  CHECK(test::bits(test::to_host(all.ids)) == test::bits(test::to_host(alone.ids)));
  CHECK(test::bits(test::to_host(all.weights)) == test::bits(test::to_host(alone.weights)));
}

TEST_CASE("moe_route is norm, router and moe_router in one, and a token's result is its own") {
  if (!test::has_gpu()) return;
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const auto& [num_experts, k, hidden] : {std::tuple{256, 8, 576}, {60, 4, 128}, {512, 10, 192}, {300, 2, 64}})
      for (const std::int64_t num_tokens : {1, 7, 16})
        for (const bool has_shared : {false, true})
          check_route({dtype, num_experts, k, hidden, num_tokens, has_shared});
}

TEST_CASE("moe_route, small [sanitizer]") {
  if (!test::has_gpu()) return;
  check_route({DType::bf16, 60, 4, 128, 1, true});
  check_route({DType::bf16, 256, 8, 128, 3, true});
  check_route({DType::f16, 300, 2, 64, 2, false});
}

struct Layer {
  std::int64_t num_tokens, k, num_experts, hidden, intermediate;
  DType dtype;
  Tensor x, gate_up, down, ids, weights, y;

  Layer(std::int64_t m, std::int64_t top_k, std::int64_t e, std::int64_t h, std::int64_t i, DType type)
      : num_tokens(m),
        k(top_k),
        num_experts(e),
        hidden(h),
        intermediate(i),
        dtype(type),
        x(test::random({m, h}, type, 1)),
        gate_up(test::random({e, 2 * i, h}, type, 2, 0.3)),
        down(test::random({e, h, i}, type, 3)),
        ids(DType::i32, {m, top_k}),
        weights(test::random({m, top_k}, DType::f32, 4)),
        y(test::random({m, h}, type, 5)) {
    std::mt19937 engine(7);
    std::vector<std::int32_t> all(static_cast<std::size_t>(e));
    std::iota(all.begin(), all.end(), 0);
    for (std::int64_t t = 0; t < m; ++t) {
      std::shuffle(all.begin(), all.end(), engine);
      std::copy_n(all.begin(), top_k, ids.as<std::int32_t>() + t * top_k);
    }
    if (m > 1) ids.as<std::int32_t>()[top_k] = -1;  // of the second token: adds nothing
  }

  // What an expert of [2 * intermediate, hidden] and [hidden, intermediate] at these offsets gives for a token.
  reference::Values expert(const reference::Values& xs, const reference::Values& up_rows,
                           const reference::Values& down_rows, std::int64_t t, std::int64_t e) const {
    const auto part = [](const reference::Values& from, std::int64_t begin, std::int64_t count) {
      return reference::Values(from.begin() + begin, from.begin() + begin + count);
    };
    const auto row = part(xs, t * hidden, hidden);
    const std::int64_t size = intermediate * hidden;
    const auto gate = reference::linear(row, part(up_rows, 2 * e * size, size), 1,
                                        static_cast<std::size_t>(intermediate), static_cast<std::size_t>(hidden));
    auto up = reference::linear(row, part(up_rows, (2 * e + 1) * size, size), 1, static_cast<std::size_t>(intermediate),
                                static_cast<std::size_t>(hidden));
    for (std::size_t i = 0; i < up.size(); ++i) up[i] *= reference::silu(gate[i]);
    return reference::linear(up, part(down_rows, e * size, size), 1, static_cast<std::size_t>(hidden),
                             static_cast<std::size_t>(intermediate));
  }

  reference::Values expected(const reference::Values& xs) const {
    auto result = test::values(y);
    const auto up_rows = test::values(gate_up), down_rows = test::values(down);
    for (std::int64_t pair = 0; pair < num_tokens * k; ++pair) {
      const std::int32_t e = ids.as<std::int32_t>()[pair];
      if (e < 0) continue;
      const auto out = expert(xs, up_rows, down_rows, pair / k, e);
      for (std::int64_t i = 0; i < hidden; ++i) result[pair / k * hidden + i] += weights.as<float>()[pair] * out[i];
    }
    return result;
  }

  Tensor scratch() const {
    const auto bytes =
        ops::moe_scratch_bytes(test::kGpu, num_tokens, static_cast<int>(k), num_experts, hidden, intermediate);
    return test::to_gpu(test::filled({static_cast<std::int64_t>(bytes / 4 + 1)}, DType::f32, NAN));
  }
};

double limit(DType dtype, std::int64_t num_terms) {
  return dtype == DType::f32 ? test::tolerance(DType::f32, num_terms) : 2.0 * test::unit_roundoff(dtype);
}

void check_experts(DType dtype, std::int64_t hidden, std::int64_t intermediate, std::int64_t num_tokens,
                   std::int64_t k) {
  CAPTURE(name(dtype));
  CAPTURE(hidden);
  CAPTURE(num_tokens);
  CAPTURE(k);
  const Layer layer(num_tokens, k, 7, hidden, intermediate, dtype);
  const Tensor x = test::to_gpu(layer.x), gate_up = test::to_gpu(layer.gate_up), down = test::to_gpu(layer.down);
  const Tensor ids = test::to_gpu(layer.ids), weights = test::to_gpu(layer.weights), y = test::to_gpu(layer.y);
  const ops::ExpertWeights experts{
      .gate = {}, .up = {}, .down = {}, .all_gate_up = test::weight_of(gate_up), .all_down = test::weight_of(down)};
  const Tensor scratch = layer.scratch();
  ops::moe_experts(kContext, x.view(), experts, ids.view(), weights.view(), scratch.view(), y.view());
  CHECK(test::relative_error(test::values(test::to_host(y)), layer.expected(test::values(layer.x))) <=
        limit(dtype, hidden * intermediate));
}

TEST_CASE("moe_experts on CUDA agrees with the reference and adds to y, whichever kernel runs") {
  if (!test::has_gpu()) return;
  for (const DType dtype : test::kFloatTypes)
    for (const auto& [hidden, intermediate] : {std::pair{64, 64}, {192, 128}, {35, 70}, {320, 192}})
      for (const auto& [num_tokens, k] : {std::pair{1, 1}, {1, 4}, {3, 2}, {8, 5}, {13, 3}, {65, 3}, {300, 2}})
        check_experts(dtype, hidden, intermediate, num_tokens, k);
}

TEST_CASE("every kernel of moe_experts on CUDA, small: streaming, grouped and plain [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const std::int64_t num_tokens : {1, 5, 12, 40}) check_experts(dtype, 128, 64, num_tokens, 3);
  check_experts(DType::bf16, 35, 70, 5, 3);
  check_experts(DType::f32, 64, 64, 5, 3);
}

TEST_CASE("the streaming and the grouped kernels agree with the reference at every number of tokens they take") {
  if (!test::has_gpu()) return;
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t num_tokens : {1, 2, 7, 8, 9, 16})
      for (const bool streaming : {false, true}) {
        CAPTURE(name(dtype));
        CAPTURE(num_tokens);
        CAPTURE(streaming);
        const Layer layer(num_tokens, 4, 9, 256, 64, dtype);
        const Tensor x = test::to_gpu(layer.x), gate_up = test::to_gpu(layer.gate_up), down = test::to_gpu(layer.down);
        const Tensor ids = test::to_gpu(layer.ids), weights = test::to_gpu(layer.weights), y = test::to_gpu(layer.y);
        const Tensor scratch = layer.scratch();
        if (streaming)
          cuda::moe_streaming({}, {.x = x.view(),
                                   .norm_weight = {},
                                   .gate_up = gate_up.view(),
                                   .down = down.view(),
                                   .expert_ids = ids.view(),
                                   .weights = weights.view(),
                                   .shared_gate_up = {},
                                   .shared_down = {},
                                   .shared_logits = {},
                                   .scratch = scratch.view(),
                                   .y = y.view()});
        else
          cuda::moe_grouped({}, {.x = x.view(),
                                 .gate_up = gate_up.view(),
                                 .down = down.view(),
                                 .expert_ids = ids.view(),
                                 .weights = weights.view(),
                                 .scratch = scratch.view(),
                                 .y = y.view()});
        CHECK(test::relative_error(test::values(test::to_host(y)), layer.expected(test::values(layer.x))) <=
              limit(dtype, 0));
      }
}

TEST_CASE("the grouped kernel agrees with the reference however many tokens an expert has") {
  if (!test::has_gpu()) return;
  for (const std::int64_t num_tokens : {17, 60, 81, 130, 190, 220, 250, 280, 320, 321, 700}) {
    CAPTURE(num_tokens);
    const Layer layer(num_tokens, 1, 1, 320, 192, DType::bf16);
    const Tensor x = test::to_gpu(layer.x), gate_up = test::to_gpu(layer.gate_up), down = test::to_gpu(layer.down);
    const Tensor ids = test::to_gpu(layer.ids), weights = test::to_gpu(layer.weights), y = test::to_gpu(layer.y);
    const Tensor scratch = layer.scratch();
    cuda::moe_grouped({}, {.x = x.view(),
                           .gate_up = gate_up.view(),
                           .down = down.view(),
                           .expert_ids = ids.view(),
                           .weights = weights.view(),
                           .scratch = scratch.view(),
                           .y = y.view()});
    CHECK(test::relative_error(test::values(test::to_host(y)), layer.expected(test::values(layer.x))) <=
          limit(DType::bf16, 0));
  }
}

TEST_CASE("moe_streaming fuses the norm before it and the shared expert [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t num_tokens : {1, 5, 12}) {
      CAPTURE(name(dtype));
      CAPTURE(num_tokens);
      const Layer layer(num_tokens, 3, 6, 128, 64, dtype);
      const Tensor norm = test::random({128}, DType::f32, 8), logits = test::random({num_tokens}, DType::f32, 9);
      const Tensor shared_up = test::random({128, 128}, dtype, 10, 0.3),
                   shared_down = test::random({128, 64}, dtype, 11);
      const auto xs = reference::rms_norm(test::values(layer.x), test::values(norm), 1e-6);
      auto expected = layer.expected(xs);
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const auto out = layer.expert(xs, test::values(shared_up), test::values(shared_down), t, 0);
        for (std::int64_t i = 0; i < 128; ++i)
          expected[t * 128 + i] += reference::sigmoid(logits.as<float>()[t]) * out[i];
      }
      const Tensor x = test::to_gpu(layer.x), gate_up = test::to_gpu(layer.gate_up), down = test::to_gpu(layer.down);
      const Tensor ids = test::to_gpu(layer.ids), weights = test::to_gpu(layer.weights), y = test::to_gpu(layer.y);
      const Tensor dnorm = test::to_gpu(norm), dlogits = test::to_gpu(logits), dup = test::to_gpu(shared_up);
      const Tensor ddown = test::to_gpu(shared_down), scratch = layer.scratch();
      cuda::moe_streaming({}, {.x = x.view(),
                               .norm_weight = dnorm.view(),
                               .eps = 1e-6F,
                               .gate_up = gate_up.view(),
                               .down = down.view(),
                               .expert_ids = ids.view(),
                               .weights = weights.view(),
                               .shared_gate_up = dup.view(),
                               .shared_down = ddown.view(),
                               .shared_logits = dlogits.view(),
                               .scratch = scratch.view(),
                               .y = y.view()});
      CHECK(test::relative_error(test::values(test::to_host(y)), expected) <= limit(dtype, 0));
    }
}

TEST_CASE("add_sigmoid_scaled on CUDA agrees with its definition [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const DType dtype : test::kFloatTypes)
    for (const DType gate_dtype : {dtype, DType::f32}) {
      const Tensor gate = test::random({5, 1}, gate_dtype, 1, 4.0), x = test::random({5, 700}, dtype, 2);
      const Tensor y = test::random({5, 700}, dtype, 3);
      auto expected = test::values(y);
      const auto g = test::values(gate), xs = test::values(x);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += reference::sigmoid(g[i / 700]) * xs[i];
      const Tensor dgate = test::to_gpu(gate), dx = test::to_gpu(x), dy = test::to_gpu(y);
      ops::add_sigmoid_scaled(kContext, dgate.view(), dx.view(), dy.view());
      CHECK(test::max_error(test::values(test::to_host(dy)), expected) <= test::tolerance(dtype, 4));
    }
}

}  // namespace
}  // namespace deltaic

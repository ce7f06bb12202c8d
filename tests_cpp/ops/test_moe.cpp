#include <doctest/doctest.h>

#include <deltaic/error.h>

#include <numeric>

#include "cpp/src/ops/moe.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

TEST_CASE("moe_router takes the k largest probabilities of all experts, ties to the lower id") {
  for (const bool renormalize : {false, true})
    for (const auto& [num_experts, k] : {std::pair{1, 1}, {5, 5}, {16, 2}, {100, 8}, {256, 8}}) {
      CAPTURE(num_experts);
      CAPTURE(k);
      CAPTURE(renormalize);
      const std::int64_t num_tokens = 40;
      Tensor logits = test::random({num_tokens, num_experts}, DType::f32, 1, 8.0);
      for (std::int64_t e = 0; e < num_experts; ++e) logits.as<float>()[e] = 1.0F;  // the first token: all tie
      Tensor ids(DType::i32, {num_tokens, k}), weights(DType::f32, {num_tokens, k});
      ops::moe_router(test::cpu_context(), logits.view(), renormalize, ids.view(), weights.view());
      const auto l = test::values(logits);
      std::vector<double> expected;
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        std::vector<std::int32_t> order(static_cast<std::size_t>(num_experts));
        std::iota(order.begin(), order.end(), 0);
        const double* row = l.data() + t * num_experts;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
        double total = 0.0, best = 0.0;
        for (int e = 0; e < num_experts; ++e) total += std::exp(row[e]);
        for (int j = 0; j < k; ++j) best += std::exp(row[order[j]]) / total;
        for (int j = 0; j < k; ++j) {
          CHECK(ids.as<std::int32_t>()[t * k + j] == order[j]);
          expected.push_back(std::exp(row[order[j]]) / total / (renormalize ? best : 1.0));
        }
      }
      CHECK(test::max_error(test::values(weights), expected) <= test::tolerance(DType::f32, num_experts));
    }
}

TEST_CASE("moe_router puts the shared expert last, with the sigmoid of its own logit") {
  const Tensor logits = test::random({5, 8}, DType::f32, 3, 2.0), shared = test::random({5, 3}, DType::f32, 4, 2.0);
  Tensor ids(DType::i32, {5, 2}), weights(DType::f32, {5, 2}), all_ids(DType::i32, {5, 3}), all(DType::f32, {5, 3});
  TensorView column = shared.view();
  column.shape[1] = 1;
  ops::moe_router(test::cpu_context(), logits.view(), true, ids.view(), weights.view());
  ops::moe_router(test::cpu_context(), logits.view(), column, true, all_ids.view(), all.view());
  for (int t = 0; t < 5; ++t) {
    for (int j = 0; j < 2; ++j) {
      CHECK(all_ids.as<std::int32_t>()[3 * t + j] == ids.as<std::int32_t>()[2 * t + j]);
      CHECK(all.as<float>()[3 * t + j] == weights.as<float>()[2 * t + j]);
    }
    CHECK(all_ids.as<std::int32_t>()[3 * t + 2] == 8);
    CHECK(all.as<float>()[3 * t + 2] == doctest::Approx(1.0 / (1.0 + std::exp(-shared.as<float>()[3 * t]))));
  }
}

TEST_CASE("moe_router gives valid ids for NaN logits") {
  const Tensor logits = test::filled({1, 8}, DType::f32, NAN);
  Tensor ids(DType::i32, {1, 3}), weights(DType::f32, {1, 3});
  ops::moe_router(test::cpu_context(), logits.view(), true, ids.view(), weights.view());
  for (int j = 0; j < 3; ++j) CHECK(ids.as<std::int32_t>()[j] == j);
  CHECK(std::isnan(weights.as<float>()[0]));
}

struct Moe {
  std::int64_t num_experts, hidden, intermediate;
  std::vector<Tensor> tensors;
  ops::ExpertWeights weights;

  Moe(std::int64_t e, std::int64_t h, std::int64_t i, DType dtype) : num_experts(e), hidden(h), intermediate(i) {
    for (std::int64_t expert = 0; expert < e; ++expert) {
      const auto add = [&](std::vector<ops::Weight>& to, std::int64_t rows, std::int64_t columns) {
        tensors.push_back(test::random({rows, columns}, dtype, 100 + static_cast<unsigned>(tensors.size())));
        to.push_back(test::weight_of(tensors.back()));
      };
      add(weights.gate, i, h), add(weights.up, i, h), add(weights.down, h, i);
    }
  }

  void run(TensorView x, TensorView ids, TensorView w, TensorView y) const {
    const auto bytes = ops::moe_scratch_bytes(x.shape[0], static_cast<int>(ids.shape[1]), hidden, intermediate);
    Tensor scratch = test::filled({static_cast<std::int64_t>(bytes / 4)}, DType::f32, NAN);
    ops::moe_experts(test::cpu_context(), x, weights, ids, w, scratch.view(), y);
  }
};

Tensor random_ids(std::int64_t num_tokens, std::int64_t k, std::int64_t num_experts) {
  Tensor ids(DType::i32, {num_tokens, k});
  std::mt19937 engine(7);
  std::vector<std::int32_t> all(static_cast<std::size_t>(num_experts));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    std::shuffle(all.begin(), all.end(), engine);
    std::copy_n(all.begin(), k, ids.as<std::int32_t>() + t * k);
  }
  return ids;
}

TEST_CASE("moe_experts agrees with the reference and adds to y") {
  for (const DType dtype : test::kFloatTypes)
    for (const auto& [num_tokens, k] : {std::pair{0, 2}, {1, 1}, {1, 4}, {3, 2}, {65, 3}}) {
      CAPTURE(name(dtype));
      CAPTURE(num_tokens);
      CAPTURE(k);
      const Moe moe(6, 35, 70, dtype);
      const Tensor x = test::random({num_tokens, moe.hidden}, DType::f32, 1);
      const Tensor weights = test::random({num_tokens, k}, DType::f32, 2);
      const Tensor ids = random_ids(num_tokens, k, moe.num_experts);
      Tensor y = test::random({num_tokens, moe.hidden}, DType::f32, 3);
      auto expected = test::values(y);
      const auto rows = test::values(x);
      for (std::int64_t t = 0; t < num_tokens; ++t)
        for (std::int64_t j = 0; j < k; ++j) {
          const auto e = static_cast<std::size_t>(ids.as<std::int32_t>()[t * k + j]);
          const reference::Values row(rows.begin() + t * moe.hidden, rows.begin() + (t + 1) * moe.hidden);
          const auto gate = reference::linear(row, test::values(moe.tensors[3 * e]), 1, moe.intermediate, moe.hidden);
          auto up = reference::linear(row, test::values(moe.tensors[3 * e + 1]), 1, moe.intermediate, moe.hidden);
          for (std::size_t i = 0; i < up.size(); ++i) up[i] *= reference::silu(gate[i]);
          const auto out = reference::linear(up, test::values(moe.tensors[3 * e + 2]), 1, moe.hidden, moe.intermediate);
          for (std::int64_t i = 0; i < moe.hidden; ++i)
            expected[t * moe.hidden + i] += weights.as<float>()[t * k + j] * out[i];
        }
      moe.run(x.view(), ids.view(), weights.view(), y.view());
      CHECK(test::max_error(test::values(y), expected) <=
            4.0 * test::tolerance(DType::f32, moe.hidden * moe.intermediate));
    }
}

TEST_CASE("a token of moe_experts has the same bits in any batch") {
  const Moe moe(8, 96, 80, DType::bf16);
  const std::int64_t num_tokens = 37, k = 2;
  const Tensor x = test::random({num_tokens, moe.hidden}, DType::f32, 1), ids = random_ids(num_tokens, k, 8);
  const Tensor weights = test::random({num_tokens, k}, DType::f32, 2);
  Tensor all(DType::f32, {num_tokens, moe.hidden}), y(DType::f32, {num_tokens, moe.hidden});
  moe.run(x.view(), ids.view(), weights.view(), all.view());
  for (std::int64_t begin = 0, size = 1; begin < num_tokens; begin += size++) {
    size = std::min(size, num_tokens - begin);
    moe.run(x.view().slice(begin, begin + size), ids.view().slice(begin, begin + size),
            weights.view().slice(begin, begin + size), y.view().slice(begin, begin + size));
  }
  CHECK(test::bits(y) == test::bits(all));
}

TEST_CASE("add_sigmoid_scaled adds the gated rows") {
  const Tensor gate = test::random({5, 1}, DType::f32, 1, 5.0), x = test::random({5, 33}, DType::f32, 2);
  Tensor y = test::random({5, 33}, DType::f32, 3);
  auto expected = test::values(y);
  for (std::size_t i = 0; i < expected.size(); ++i)
    expected[i] += reference::sigmoid(gate.as<float>()[i / 33]) * x.as<float>()[i];
  ops::add_sigmoid_scaled(test::cpu_context(), gate.view(), x.view(), y.view());
  CHECK(test::max_error(test::values(y), expected) <= test::tolerance(DType::f32, 2));
}

TEST_CASE("moe_experts refuses an expert that does not exist and a scratch that is too small") {
  const Moe moe(2, 8, 8, DType::f32);
  const Tensor x(DType::f32, {1, 8}), y(DType::f32, {1, 8}), weights(DType::f32, {1, 1});
  Tensor ids(DType::i32, {1, 1});
  Tensor small(DType::f32, {23});
  CHECK_THROWS_WITH_AS(
      ops::moe_experts(test::cpu_context(), x.view(), moe.weights, ids.view(), weights.view(), small.view(), y.view()),
      "moe_experts: scratch has 92 bytes, 96 are needed", InvalidArgument);
  ids.as<std::int32_t>()[0] = 2;
  CHECK_THROWS_AS(moe.run(x.view(), ids.view(), weights.view(), y.view()), InvalidArgument);
}

}  // namespace
}  // namespace deltaic

#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/ops/linear.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

struct Size {
  std::int64_t num_tokens, in_features, out_features;
};

TEST_CASE("linear agrees with the reference") {
  for (const DType dtype : test::kFloatTypes)
    for (const auto& [m, k, n] :
         {Size{0, 8, 4}, Size{1, 1, 1}, Size{1, 64, 5}, Size{2, 33, 7}, Size{3, 127, 66}, Size{5, 1023, 4},
          Size{6, 1024, 70}, Size{7, 1025, 129}, Size{13, 3585, 3}, Size{50, 96, 31}, Size{97, 40, 300}}) {
      CAPTURE(name(dtype));
      CAPTURE(m);
      CAPTURE(k);
      CAPTURE(n);
      const Tensor x = test::random({m, k}, DType::f32, 1), w = test::random({n, k}, dtype, 2);
      Tensor y = test::filled({m, n}, DType::f32, NAN);
      ops::linear(test::cpu_context(), x.view(), test::weight_of(w), y.view());
      const auto expected = reference::linear(test::values(x), test::values(w), static_cast<std::size_t>(m),
                                              static_cast<std::size_t>(n), static_cast<std::size_t>(k));
      CHECK(test::max_error(test::values(y), expected) <= test::tolerance(DType::f32, k));
    }
}

TEST_CASE("linear adds a bias and accumulates over strided rows") {
  const std::int64_t m = 9, k = 1100, n = 21;
  const Tensor x = test::random({m, k + 5}, DType::f32, 1), w = test::random({n, k + 3}, DType::bf16, 2);
  const Tensor bias = test::random({n}, DType::f32, 3), old = test::random({m, n + 2}, DType::f32, 4);
  Tensor y = test::copy_of(old);
  TensorView xv = x.view(), wv = w.view(), yv = y.view();
  xv.shape[1] = k, wv.shape[1] = k, yv.shape[1] = n;
  ops::linear(test::cpu_context(), xv, {.view = wv, .owner = nullptr}, {.bias = bias.view(), .accumulate = true}, yv);
  auto expected = reference::linear(test::values(xv), test::values(wv), m, n, k);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) expected[i * n + j] += old.as<float>()[i * (n + 2) + j] + bias.as<float>()[j];
  CHECK(test::max_error(test::values(yv), expected) <= test::tolerance(DType::f32, k));
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = n; j < n + 2; ++j) CHECK(y.as<float>()[i * (n + 2) + j] == old.as<float>()[i * (n + 2) + j]);
}

TEST_CASE("a row of linear has the same bits in any batch") {
  for (const DType dtype : test::kFloatTypes)
    for (const auto& [m, k, n] : {Size{131, 2600, 37}, Size{131, 77, 700}}) {
      const Tensor x = test::random({m, k}, DType::f32, 1), w = test::random({n, k}, dtype, 2);
      Tensor all(DType::f32, {m, n});
      ops::linear(test::cpu_context(), x.view(), test::weight_of(w), all.view());
      for (const std::int64_t size : {1, 2, 3, 4, 5, 6, 7, 8, 11, 32, 64, 100}) {
        CAPTURE(name(dtype));
        CAPTURE(size);
        Tensor y(DType::f32, {m, n});
        for (std::int64_t begin = 0; begin < m; begin += size) {
          const std::int64_t end = std::min(begin + size, m);
          ops::linear(test::cpu_context(), x.view().slice(begin, end), test::weight_of(w), y.view().slice(begin, end));
        }
        CHECK(test::bits(y) == test::bits(all));
      }
    }
}

TEST_CASE("linear refuses tensors that do not fit") {
  const Tensor x(DType::f32, {2, 8}), w(DType::bf16, {4, 9}), y(DType::f32, {2, 4});
  CHECK_THROWS_WITH_AS(ops::linear(test::cpu_context(), x.view(), test::weight_of(w), y.view()),
                       "linear: weight has shape [4, 9], expected [any, 8]", InvalidArgument);
  const ops::Context cuda{.device = {DeviceType::cuda, 0}};
  CHECK_THROWS_WITH_AS(ops::linear(cuda, x.view(), test::weight_of(w), y.view()),
                       "linear: x is on cpu:0, the op runs on cuda:0", InvalidArgument);
}

}  // namespace
}  // namespace deltaic

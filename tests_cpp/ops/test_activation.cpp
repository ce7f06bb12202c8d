#include <doctest/doctest.h>

#include "cpp/src/ops/activation.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

TEST_CASE("silu_mul agrees with the reference, in place and over strided rows") {
  for (const std::int64_t size : {1, 5, 16, 100, 3584})
    for (const std::int64_t num_tokens : {0, 1, 9}) {
      CAPTURE(size);
      CAPTURE(num_tokens);
      const Tensor rows = test::random({num_tokens, 2 * size}, DType::f32, 1, 40.0);
      TensorView gate = rows.view(), up = rows.view();
      gate.shape[1] = up.shape[1] = size;
      up.data = rows.as<float>() + size;
      const auto g = test::values(gate), u = test::values(up);
      std::vector<double> expected(g.size());
      for (std::size_t i = 0; i < g.size(); ++i) expected[i] = reference::silu(g[i]) * u[i];
      ops::silu_mul(test::cpu_context(), gate, up, gate);
      CHECK(test::max_error(test::values(gate), expected) <= test::tolerance(DType::f32, 1));
      CHECK(test::values(up) == u);
    }
}

TEST_CASE("sigmoid_mul agrees with the reference, the gate inside the rows of a projection") {
  for (const std::int64_t dim : {1, 3, 64, 129}) {
    const std::int64_t num_tokens = 33, num_heads = 4;
    const Tensor x = test::random({num_tokens, num_heads, dim}, DType::f32, 1);
    const Tensor rows = test::random({num_tokens, num_heads, 2 * dim}, DType::f32, 2, 100.0);
    TensorView gate = rows.view();
    gate.data = rows.as<float>() + dim, gate.shape[2] = dim;
    auto expected = test::values(x);
    const auto g = test::values(gate);
    for (std::size_t i = 0; i < g.size(); ++i) expected[i] *= reference::sigmoid(g[i]);
    ops::sigmoid_mul(test::cpu_context(), gate, x.view());
    CHECK(test::max_error(test::values(x), expected) <= test::tolerance(DType::f32, 1));
  }
}

TEST_CASE("silu_mul survives extreme gates and passes NaN on") {
  Tensor gate = test::filled({1, 20}, DType::f32, 1000.0), up = test::filled({1, 20}, DType::f32, 1.0);
  gate.as<float>()[1] = -1000.0F, gate.as<float>()[2] = -88.0F, gate.as<float>()[19] = NAN;
  Tensor y(DType::f32, {1, 20});
  ops::silu_mul(test::cpu_context(), gate.view(), up.view(), y.view());
  CHECK(y.as<float>()[0] == 1000.0F);
  CHECK(y.as<float>()[1] == 0.0F);
  CHECK(std::fabs(y.as<float>()[2]) < 1e-30F);
  CHECK(std::isnan(y.as<float>()[19]));
}

}  // namespace
}  // namespace deltaic

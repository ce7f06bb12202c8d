#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/ops/rms_norm.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

constexpr float kEps = 1e-6F;

TEST_CASE("rms_norm agrees with the reference") {
  struct Case {
    std::int64_t num_tokens, hidden_size;
  };
  for (const auto [num_tokens, hidden_size] : {Case{0, 64}, Case{1, 1}, Case{3, 127}, Case{200, 96}, Case{17, 4096}})
    for (const bool in_place : {false, true}) {
      CAPTURE(num_tokens);
      CAPTURE(hidden_size);
      CAPTURE(in_place);
      const Tensor x = test::random({num_tokens, hidden_size}, DType::f32, 1);
      const Tensor weight = test::random({hidden_size}, DType::f32, 2);
      Tensor y = in_place ? test::copy_of(x) : Tensor(DType::f32, {num_tokens, hidden_size});
      ops::rms_norm(test::cpu_context(), in_place ? y.view() : x.view(), weight.view(), kEps, y.view());
      const auto expected = reference::rms_norm(test::values(x), test::values(weight), kEps);
      CHECK(test::max_error(test::values(y), expected) <= test::tolerance(DType::f32, hidden_size));
    }
}

TEST_CASE("gated_rms_norm agrees with the reference, z inside the rows of a projection") {
  for (const std::int64_t dim : {1, 7, 16, 33, 128}) {
    const std::int64_t num_tokens = 70, num_heads = 3;
    CAPTURE(dim);
    const Tensor x = test::random({num_tokens, num_heads, dim}, DType::f32, 1);
    const Tensor rows = test::random({num_tokens, num_heads, 2 * dim + 1}, DType::f32, 2, 30.0);
    const Tensor weight = test::random({dim}, DType::f32, 3);
    TensorView z = rows.view();
    z.data = rows.as<float>() + dim, z.shape[2] = dim;
    Tensor y(DType::f32, {num_tokens, num_heads, dim});
    ops::gated_rms_norm(test::cpu_context(), x.view(), z, weight.view(), kEps, y.view());
    auto expected = reference::rms_norm(test::values(x), test::values(weight), kEps);
    const auto gate = test::values(z);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] *= reference::silu(gate[i]);
    CHECK(test::max_error(test::values(y), expected) <= test::tolerance(DType::f32, dim));
  }
}

TEST_CASE("rms_norm names the tensor that does not fit") {
  const Tensor x(DType::f32, {2, 8}), weight(DType::f32, {9}), y(DType::f32, {2, 8});
  CHECK_THROWS_WITH_AS(ops::rms_norm(test::cpu_context(), x.view(), weight.view(), kEps, y.view()),
                       "rms_norm: weight has shape [9], expected [8]", InvalidArgument);
}

}  // namespace
}  // namespace deltaic

#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/ops/embedding.h"
#include "tests_cpp/support/tensors.h"

namespace deltaic {
namespace {

TEST_CASE("embedding copies rows exactly") {
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t size : {1, 7, 64, 1025}) {
      CAPTURE(name(dtype));
      CAPTURE(size);
      const Tensor table = test::random({11, size}, dtype, 1);
      const Tensor ids = test::ints({3, 0, 10, 3});
      Tensor y(DType::f32, {4, size});
      ops::embedding(test::cpu_context(), ids.view(), test::weight_of(table), y.view());
      const auto rows = test::values(table), actual = test::values(y);
      for (std::int64_t t = 0; t < 4; ++t)
        for (std::int64_t i = 0; i < size; ++i)
          CHECK(actual[t * size + i] == rows[ids.as<std::int32_t>()[t] * size + i]);
    }
}

TEST_CASE("every f16 and bf16 number is widened as its definition says") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Tensor table(dtype, {1, 65536});
    for (int i = 0; i < 65536; ++i) table.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
    Tensor y(DType::f32, {1, 65536});
    ops::embedding(test::cpu_context(), test::ints({0}).view(), test::weight_of(table), y.view());
    const auto expected = test::values(table), actual = test::values(y);
    int wrong = 0;
    for (int i = 0; i < 65536; ++i)
      if (std::isnan(expected[i]) ? !std::isnan(actual[i]) : actual[i] != expected[i]) ++wrong;
    CHECK(wrong == 0);
  }
}

TEST_CASE("embedding refuses an id outside the table") {
  const Tensor table(DType::f32, {4, 8}), y(DType::f32, {2, 8});
  CHECK_THROWS_WITH_AS(ops::embedding(test::cpu_context(), test::ints({1, 4}).view(), test::weight_of(table), y.view()),
                       "embedding: token id 4, the table has 4 rows", InvalidArgument);
}

}  // namespace
}  // namespace deltaic

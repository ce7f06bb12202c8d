#include "cpp/src/core/half.h"

#include <cmath>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "tests_cpp/support/tensors.h"

using namespace deltaic;

TEST_CASE("rounding to 16 bits is to nearest, ties to even, and every number comes back") {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (const double value = test::from_half(half); !std::isnan(value)) {
      REQUIRE(to_f32(&half, DType::f16) == value);
      REQUIRE(to_f16(static_cast<float>(value)) == half);
    }
    if (const double value = test::from_bf16(half); !std::isnan(value)) {
      REQUIRE(to_f32(&half, DType::bf16) == value);
      REQUIRE(to_bf16(static_cast<float>(value)) == half);
    }
  }
  const Tensor values = test::random({4000}, DType::f32, 1, 10.0);
  for (int i = 0; i < 4000; ++i) {
    const float value = std::ldexp(values.as<float>()[i], i % 50 - 30);
    CAPTURE(value);
    REQUIRE(to_f16(value) == test::to_16_bits(value, DType::f16));
    REQUIRE(to_bf16(value) == test::to_16_bits(value, DType::bf16));
  }
  for (const float tie : {2049.0F, 2051.0F, 0x1p-25F, 0x1.8p-24F, 65519.0F, 65520.0F})
    CHECK(to_f16(tie) == test::to_16_bits(tie, DType::f16));
  const std::int8_t integer = 1;
  CHECK_THROWS_AS(to_f32(&integer, DType::i8), Unsupported);
}

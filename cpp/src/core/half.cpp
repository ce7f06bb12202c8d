#include "cpp/src/core/half.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

template <class T>
T load(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

float f16_to_f32(std::uint16_t bits) {
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1F, mantissa = bits & 0x3FF;
  if (exponent == 0x1F) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 0x400), exponent - 25);
}

}  // namespace

float to_f32(const void* address, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return load<float>(address);
    case DType::f64:
      return static_cast<float>(load<double>(address));
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(address)) << 16);
    case DType::f16:
      return f16_to_f32(load<std::uint16_t>(address));
    default:
      throw Unsupported(detail::concat("an element of dtype ", name(dtype), " where a floating-point one is needed"));
  }
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

std::uint16_t to_f16(float value) {
  const auto sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16 & 0x8000U);
  int exponent = 0;
  const float magnitude = std::fabs(value);
  if (magnitude == 0.0F) return sign;
  (void)std::frexp(magnitude, &exponent);  // magnitude is in [2^(exponent - 1), 2^exponent)
  // In units of the last place; subnormal numbers have that of the smallest normal ones. Exact in f32.
  const int unit = std::max(exponent, -13) - 11;
  const float units = std::nearbyint(std::ldexp(magnitude, -unit));
  if (std::isinf(magnitude) || std::ldexp(units, unit) > 65504.0F) return static_cast<std::uint16_t>(sign | 0x7C00U);
  // 1024 units more than the exponent says; a carry into the next exponent is right by itself.
  const auto bits = static_cast<std::uint32_t>(units) + (static_cast<std::uint32_t>(unit + 24) << 10);
  return static_cast<std::uint16_t>(sign | bits);
}

}  // namespace deltaic

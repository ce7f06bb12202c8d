#include "cpp/src/core/half.h"

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

}  // namespace deltaic

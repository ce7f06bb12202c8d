#pragma once

#include <cstdint>

#include <deltaic/tensor.h>

namespace deltaic {

// The element at any address, aligned or not. Throws Unsupported for a dtype that is not a floating-point one.
float to_f32(const void* address, DType dtype);

// Rounded to nearest, ties to even. Not for NaN.
std::uint16_t to_bf16(float value);
std::uint16_t to_f16(float value);

}  // namespace deltaic

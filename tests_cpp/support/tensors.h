#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include <deltaic/tensor.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic::test {

inline constexpr DType kFloatTypes[] = {DType::f32, DType::f16, DType::bf16};

// A CPU context with more threads than a task needs, so that splits happen.
inline ops::Context cpu_context() {
  static ThreadPool pool(3);
  return {.device = {}, .stream = {}, .threads = &pool};
}

// f16 and bf16 by their definitions, independent of the kernels under test.
inline double from_half(std::uint16_t bits) {
  const int sign = bits >> 15, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return sign != 0 ? -value : value;
}
inline double from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline double element(const TensorView& view, std::int64_t offset) {
  switch (view.dtype) {
    case DType::f32:
      return view.as<float>()[offset];
    case DType::f16:
      return from_half(view.as<std::uint16_t>()[offset]);
    case DType::bf16:
      return from_bf16(view.as<std::uint16_t>()[offset]);
    default:
      REQUIRE(false);
      return 0.0;
  }
}

// Rounds to nearest, ties to even, by search among the neighbours; slow and obvious.
inline std::uint16_t to_16_bits(double value, DType dtype) {
  const auto decode = [&](std::uint16_t bits) { return dtype == DType::f16 ? from_half(bits) : from_bf16(bits); };
  if (std::isnan(value)) return 0x7fff;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  std::uint16_t low = 0, high = dtype == DType::f16 ? 0x7c00 : 0x7f80;  // 0 and infinity
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (decode(middle) <= magnitude ? low : high) = middle;
  }
  // Infinity stands where the next number would be.
  const double next = std::isfinite(decode(high)) ? decode(high) : dtype == DType::f16 ? 0x1p16 : 0x1p128;
  const double below = magnitude - decode(low), above = next - magnitude;
  const bool up = below > above || (below == above && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

inline void set_element(const TensorView& view, std::int64_t offset, double value) {
  if (view.dtype == DType::f32)
    view.as<float>()[offset] = static_cast<float>(value);
  else
    view.as<std::uint16_t>()[offset] = to_16_bits(value, view.dtype);
}

inline void fill(const Tensor& tensor, double value) {
  for (std::int64_t i = 0; i < tensor.view().numel(); ++i) set_element(tensor.view(), i, value);
}

// Uniform in [-limit, limit), rounded to dtype.
inline Tensor random(std::initializer_list<std::int64_t> shape, DType dtype, unsigned seed, double limit = 1.0) {
  Tensor tensor(dtype, shape);
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(-limit, limit);
  for (std::int64_t i = 0; i < tensor.view().numel(); ++i) set_element(tensor.view(), i, uniform(engine));
  return tensor;
}

inline Tensor filled(std::initializer_list<std::int64_t> shape, DType dtype, double value) {
  Tensor tensor(dtype, shape);
  fill(tensor, value);
  return tensor;
}

template <class T>
Tensor from_values(DType dtype, const std::vector<T>& values) {
  Tensor tensor(dtype, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.as<T>());
  return tensor;
}
inline Tensor ints(const std::vector<std::int32_t>& values) { return from_values(DType::i32, values); }
inline Tensor longs(const std::vector<std::int64_t>& values) { return from_values(DType::i64, values); }
inline Tensor bytes(const std::vector<std::uint8_t>& values) { return from_values(DType::u8, values); }

inline Tensor copy_of(const Tensor& tensor) {
  const TensorView& view = tensor.view();
  Tensor copy(view.dtype, std::span<const std::int64_t>(view.shape.data(), static_cast<std::size_t>(view.rank)));
  std::memcpy(copy.view().data, view.data, view.num_bytes());
  return copy;
}

// The same tensor in the memory of another device.
inline Tensor copy_to(const Tensor& tensor, Device device) {
  const TensorView& view = tensor.view();
  Tensor copy(view.dtype, std::span<const std::int64_t>(view.shape.data(), static_cast<std::size_t>(view.rank)),
              device);
  if (view.num_bytes() == 0) return copy;
  if (device.type == DeviceType::cuda || view.device.type == DeviceType::cuda)
    cuda::copy_and_wait(copy.view().data, view.data, view.num_bytes());
  else
    std::memcpy(copy.view().data, view.data, view.num_bytes());
  return copy;
}

inline ops::Context context_of(Device device) {
  ops::Context ctx = cpu_context();
  ctx.device = device;
  return ctx;
}

inline ops::Weight weight_of(const Tensor& tensor) { return {.view = tensor.view(), .owner = nullptr}; }

// The elements in order, as doubles; strides respected.
inline std::vector<double> values(const TensorView& view) {
  std::vector<double> result;
  std::array<std::int64_t, kMaxRank> index{};
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    std::int64_t offset = 0;
    for (int d = 0; d < view.rank; ++d) offset += index[d] * view.stride[d];
    result.push_back(element(view, offset));
    for (int d = view.rank - 1; d >= 0 && ++index[d] == view.shape[d]; --d) index[d] = 0;
  }
  return result;
}
inline std::vector<double> values(const Tensor& tensor) { return values(tensor.view()); }

// The bits of a contiguous tensor's memory.
inline std::vector<char> bits(const TensorView& view) {
  const char* data = static_cast<const char*>(view.data);
  return {data, data + view.num_bytes()};
}
inline std::vector<char> bits(const Tensor& tensor) { return bits(tensor.view()); }

// The largest |actual - expected| / (1 + |expected|); infinite when a value is not finite.
inline double max_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  double error = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    error = std::max(error, std::fabs(actual[i] - expected[i]) / (1.0 + std::fabs(expected[i])));
  }
  return error;
}

}  // namespace deltaic::test

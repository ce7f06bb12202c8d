#include "cpp/src/models/weight_reader.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

// Reads an element at any address: files promise no alignment.
template <class T>
T load(const char* address) {
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

float to_f32(const char* address, DType dtype) {
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
      throw Unsupported(detail::concat("a weight of dtype ", name(dtype)));
  }
}

void check_dtype(const Checkpoint& checkpoint, std::string_view tensor_name, DType dtype,
                 std::initializer_list<DType> allowed) {
  for (const DType one : allowed)
    if (dtype == one) return;
  throw Unsupported(detail::concat("the tensor ", checkpoint.stored_name(tensor_name), " has dtype ", name(dtype),
                                   ", which is not supported for it"));
}

}  // namespace

ops::Weight WeightReader::take(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows) {
  const StoredTensor& stored = checkpoint_.get(name, shape);
  check_dtype(checkpoint_, name, stored.view.dtype, {DType::f32, DType::f16, DType::bf16});
  const std::size_t num_bytes = stored.view.num_bytes();
  num_bytes_ += static_cast<std::int64_t>(num_bytes);
  ops::Weight weight{.view = stored.view.reshape({rows, shape.back()}), .owner = stored.owner};
  if (reinterpret_cast<std::uintptr_t>(weight.view.data) % size_of(weight.view.dtype) != 0) {
    const auto copy = std::make_shared<const Buffer>(num_bytes, Device{});
    std::memcpy(copy->data(), weight.view.data, num_bytes);
    weight.view.data = copy->data();
    weight.owner = copy;
  }
  return weight;
}

ops::Weight WeightReader::matrix(std::string_view name, std::int64_t out_features, std::int64_t in_features) {
  return take(name, std::array{out_features, in_features}, out_features);
}

ops::Weight WeightReader::stacked_matrices(std::string_view name, std::int64_t count, std::int64_t out_features,
                                           std::int64_t in_features) {
  return take(name, std::array{count, out_features, in_features}, count * out_features);
}

Tensor WeightReader::values(std::string_view name, std::initializer_list<std::int64_t> shape, float offset) {
  const std::span<const std::int64_t> sizes(shape.begin(), shape.size());
  const StoredTensor& stored = checkpoint_.get(name, sizes);
  const DType dtype = stored.view.dtype;
  check_dtype(checkpoint_, name, dtype, {DType::f32, DType::f16, DType::bf16, DType::f64});
  Tensor result(DType::f32, sizes);
  const char* source = static_cast<const char*>(stored.view.data);
  float* values = result.as<float>();
  for (std::int64_t i = 0; i < result.view().numel(); ++i)
    values[i] = to_f32(source + i * static_cast<std::int64_t>(size_of(dtype)), dtype) + offset;
  num_bytes_ += static_cast<std::int64_t>(result.view().num_bytes());
  return result;
}

ops::Weight rows(const ops::Weight& matrix, std::int64_t begin, std::int64_t end) {
  return {.view = matrix.view.slice(begin, end), .owner = matrix.owner};
}

}  // namespace deltaic

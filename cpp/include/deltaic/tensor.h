#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>
#include <type_traits>

namespace deltaic {

enum class DType : std::uint8_t { f32, f16, bf16, f64, i8, i32, i64, u8 };

// Bytes of one element.
std::size_t size_of(DType dtype);
// "f32", "bf16", ...
std::string_view name(DType dtype);

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 6;

// A view of a strided tensor. It owns nothing: whoever made it keeps the memory alive. Strides are in elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  std::int64_t numel() const;
  std::size_t num_bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }
  bool is_contiguous() const;

  // The elements as T. T must be what dtype says (std::uint16_t for f16 and bf16); checked.
  template <class T>
  T* as() const;

  // Rows [begin, end) of dimension 0. Checked.
  TensorView slice(std::int64_t begin, std::int64_t end) const;
  // The same elements with another shape. The view must be contiguous and the element count equal; checked.
  TensorView reshape(std::span<const std::int64_t> new_shape) const;
  TensorView reshape(std::initializer_list<std::int64_t> new_shape) const {
    return reshape(std::span<const std::int64_t>(new_shape.begin(), new_shape.size()));
  }
};

// A contiguous view. Throws InvalidArgument for a rank over kMaxRank or a negative size.
TensorView make_view(void* data, DType dtype, std::span<const std::int64_t> shape, Device device = {});
inline TensorView make_view(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return make_view(data, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()), device);
}

// Throws InvalidArgument when a view of `dtype` is read as elements of `element_bytes` (used by TensorView::as).
void check_element_access(DType dtype, std::size_t element_bytes, bool is_float);

template <class T>
T* TensorView::as() const {
  check_element_access(dtype, sizeof(T), std::is_floating_point_v<T>);
  return static_cast<T*>(data);
}

}  // namespace deltaic

#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/half.h"
#include "cpp/src/core/transfer.h"

namespace deltaic {

// Values between the host and a device, for the dense references: each copy waits.

inline void copy_values(void* dst, const void* src, std::size_t num_bytes, Device device) {
  if (device.type == DeviceType::cuda)
    cuda::copy_and_wait(dst, src, num_bytes);
  else
    std::memcpy(dst, src, num_bytes);
}

// [values.size()] of a dtype with the size of T.
template <class T>
Tensor on_device(const std::vector<T>& values, DType dtype, Device device) {
  Tensor tensor(dtype, {static_cast<std::int64_t>(values.size())}, device);
  copy_values(tensor.view().data, values.data(), tensor.view().num_bytes(), device);
  return tensor;
}

// [num_rows, values.size() / num_rows] f32 | f16 | bf16.
inline Tensor rows_on_device(std::span<const float> values, std::int64_t num_rows, DType dtype, Device device) {
  Tensor tensor(dtype, {num_rows, static_cast<std::int64_t>(values.size()) / num_rows}, device);
  std::vector<std::uint16_t> halves;
  if (dtype != DType::f32)
    for (const float value : values) halves.push_back(dtype == DType::bf16 ? to_bf16(value) : to_f16(value));
  const void* source = dtype == DType::f32 ? static_cast<const void*>(values.data()) : halves.data();
  copy_values(tensor.view().data, source, tensor.view().num_bytes(), device);
  return tensor;
}

// Waits for what gives the view, a contiguous one, and appends its elements.
inline void append_values(const TensorView& view, std::vector<float>& values) {
  std::vector<char> bytes(view.num_bytes());
  copy_values(bytes.data(), view.data, bytes.size(), view.device);
  const std::size_t element_bytes = size_of(view.dtype);
  for (std::size_t i = 0; i < bytes.size(); i += element_bytes) values.push_back(to_f32(&bytes[i], view.dtype));
}

}  // namespace deltaic

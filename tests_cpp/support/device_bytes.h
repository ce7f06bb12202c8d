#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <deltaic/tensor.h>
#include <doctest/doctest.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/transfer.h"

namespace deltaic::test {

// The CPU and, where build and machine have one, the first GPU. Says so, once, when there is none.
inline std::vector<Device> devices() {
  static const bool has_cuda = [] {
    const bool found = cuda::num_devices() > 0;
    if (!found) MESSAGE("no CUDA device in this build or machine: only the CPU is tested");
    return found;
  }();
  if (has_cuda) return {Device{}, Device{DeviceType::cuda, 0}};
  return {Device{}};
}

// A vector of T in the memory of a device.
template <class T>
class DeviceVector {
 public:
  DeviceVector(const std::vector<T>& values, Device device)
      : size_(values.size()), device_(device), buffer_(values.size() * sizeof(T), device) {
    copy(buffer_.data(), values.data());
  }

  T* data() const { return static_cast<T*>(buffer_.data()); }
  TensorView view(DType dtype) const { return make_view(data(), dtype, {static_cast<std::int64_t>(size_)}, device_); }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    copy(values.data(), buffer_.data());
    return values;
  }

 private:
  void copy(void* dst, const void* src) const {
    if (size_ == 0) return;
    if (device_.type == DeviceType::cuda)
      cuda::copy_and_wait(dst, src, size_ * sizeof(T));
    else
      std::memcpy(dst, src, size_ * sizeof(T));
  }

  std::size_t size_;
  Device device_;
  Buffer buffer_;
};

inline std::vector<std::uint8_t> random_bytes(std::size_t num_bytes, std::uint32_t seed) {
  std::vector<std::uint8_t> bytes(num_bytes);
  std::uint32_t state = seed * 2654435761U + 1;
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>((state = state * 1664525U + 1013904223U) >> 24);
  return bytes;
}

}  // namespace deltaic::test

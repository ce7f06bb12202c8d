#pragma once

#include <cstddef>
#include <memory>

#include <deltaic/tensor.h>

namespace deltaic {

// Owned memory of one device: 64-byte aligned and zeroed on the host. Move-only.
class Buffer {
 public:
  Buffer() = default;
  // Throws OutOfMemory with the number of bytes, Unsupported for a CUDA device in a build without CUDA.
  Buffer(std::size_t num_bytes, Device device);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const { return data_.get(); }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<void> data_;
  std::size_t num_bytes_ = 0;
};

// A tensor that owns its memory. Move-only; view() is how it is used.
class Tensor {
 public:
  Tensor() = default;
  // A contiguous, zeroed tensor. Throws as Buffer does.
  Tensor(DType dtype, std::span<const std::int64_t> shape, Device device = {});
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape, Device device = {})
      : Tensor(dtype, std::span<const std::int64_t>(shape.begin(), shape.size()), device) {}
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;

  const TensorView& view() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

namespace cuda {
// Zeroed memory of a device, freed with the last copy of the pointer. Throws OutOfMemory or DeviceError.
std::shared_ptr<void> allocate(std::size_t num_bytes, int device_index);
}  // namespace cuda

}  // namespace deltaic

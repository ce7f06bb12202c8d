#include "cpp/src/core/buffer.h"

#include <cstdlib>
#include <limits>
#include <utility>

#include "cpp/src/check.h"

namespace deltaic {
namespace {

constexpr std::size_t kAlignment = 64;

// calloc, not memset: the pages of a large buffer cost nothing until they are touched.
std::shared_ptr<void> allocate_host(std::size_t num_bytes) {
  const bool fits = num_bytes <= std::numeric_limits<std::size_t>::max() - kAlignment;
  void* memory = fits ? std::calloc(num_bytes + kAlignment, 1) : nullptr;
  if (memory == nullptr)
    throw OutOfMemory(detail::concat("no memory for a buffer of ", num_bytes, " bytes on the host"));
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  void* aligned = static_cast<char*>(memory) + (kAlignment - address % kAlignment) % kAlignment;
  return std::shared_ptr<void>(aligned, [memory](void*) { std::free(memory); });
}

}  // namespace

Buffer::Buffer(std::size_t num_bytes, Device device) : num_bytes_(num_bytes) {
  switch (device.type) {
    case DeviceType::cpu:
      data_ = allocate_host(num_bytes);
      return;
    case DeviceType::cuda:
      data_ = cuda::allocate(num_bytes, device.index);
      return;
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::move(other.data_)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  data_ = std::move(other.data_);
  num_bytes_ = std::exchange(other.num_bytes_, 0);
  return *this;
}

Tensor::Tensor(DType dtype, std::span<const std::int64_t> shape, Device device)
    : view_(make_view(nullptr, dtype, shape, device)) {
  std::int64_t num_bytes = static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t size : shape)
    DELTAIC_CHECK(!__builtin_mul_overflow(num_bytes, size, &num_bytes), "a tensor of more than 2^63 bytes");
  buffer_ = Buffer(static_cast<std::size_t>(num_bytes), device);
  view_.data = buffer_.data();
}

}  // namespace deltaic

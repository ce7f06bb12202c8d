#pragma once

#include <cstdint>
#include <memory>

#include <deltaic/tensor.h>

namespace deltaic::cuda {

// Copies tensors from pageable or mapped memory to a device, through two pinned buffers in turn.
class Uploader {
 public:
  virtual ~Uploader() = default;
  // Enqueues dst = src, converted on the device where the dtypes differ. src has been read when it returns.
  //   src  contiguous, on the host, at any address; f32 | f16 | bf16
  //   dst  contiguous, on the device, as many elements; f32 | f16 | bf16
  virtual void upload(const TensorView& src, const TensorView& dst) = 0;
  // Waits until everything has arrived.
  virtual void finish() = 0;
};
// Throws OutOfMemory or DeviceError.
std::unique_ptr<Uploader> make_uploader(int device_index);

// Enqueues dst[i] = uniform(seed, i, centre, scale) on the default stream.
//   dst  contiguous, on a device; f32 | f16 | bf16
void fill_uniform(const TensorView& dst, std::uint64_t seed, float centre, float scale);

}  // namespace deltaic::cuda

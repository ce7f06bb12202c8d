#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "cpp/src/ops/context.h"
#include "cuda/check.h"

namespace deltaic::cuda {

inline cudaStream_t native(ops::Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

template <auto Destroy>
struct Destroyer {  // a destructor does not throw: at exit the driver may be gone already
  template <class T>
  void operator()(T* handle) const noexcept {
    (void)Destroy(handle);
  }
};
template <class Handle, auto Destroy>
using Unique = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<Destroy>>;

using UniqueEvent = Unique<cudaEvent_t, cudaEventDestroy>;
using UniqueStream = Unique<cudaStream_t, cudaStreamDestroy>;

// Makes a device current as long as it lives: launches on the default stream go to the current device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index) : device_index_(device_index) {
    check(cudaGetDevice(&previous_));
    if (previous_ != device_index_) check(cudaSetDevice(device_index_));
  }
  ~DeviceGuard() {
    if (previous_ != device_index_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_index_, previous_ = 0;
};

}  // namespace deltaic::cuda

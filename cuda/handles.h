#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "cpp/src/ops/context.h"

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

}  // namespace deltaic::cuda

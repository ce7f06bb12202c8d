#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/check.h"

namespace deltaic::cuda {

// The one way to launch a kernel: launch errors are reported where they happen.
struct Launch {
  dim3 grid, block;
  cudaStream_t stream;  // no default: the caller always says which
  std::size_t shared_bytes = 0;

  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), Args&&... args) const {
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
  }
};

}  // namespace deltaic::cuda

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/check.h"
#include "cuda/kernel_limits.h"

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

// A launch that may begin before the previous kernel of the stream has ended (programmatic dependent launch): the
// kernel calls wait_for_previous_kernel() before it reads what others wrote, and before it writes anything. An ordinary
// launch before compute capability 9.0.
struct DependentLaunch {
  dim3 grid, block;
  cudaStream_t stream;
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks of a cluster, along x

  template <class... Params, class... Args>
  void operator()(void (*kernel)(Params...), Args&&... args) const {
    int device = 0;
    check(cudaGetDevice(&device));
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : has_clusters(device) ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
  }
};

// Programmatic dependent launch: what comes before the wait may run while the previous kernel of the stream still does,
// and must not read what it writes.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace deltaic::cuda

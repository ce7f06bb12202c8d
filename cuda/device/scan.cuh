#pragma once

#include <cstdint>

namespace deltaic::cuda {

// The sum over threads 0 ... threadIdx.x of a block of kThreads (a multiple of 32, at most 1024). Every thread calls
// it; a barrier must lie between two calls.
template <int kThreads, class T>
__device__ T inclusive_block_sum(T value) {
  __shared__ T warp_sums[kThreads / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0U, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
#pragma unroll
  for (unsigned i = 0; i < kThreads / 32; ++i)
    if (i < warp) value += warp_sums[i];
  return value;
}

}  // namespace deltaic::cuda

#pragma once

namespace deltaic::cuda {

// The sum over a block of kThreads threads (a multiple of 32), in every thread. All threads must call it.
template <int kThreads>
__device__ float block_sum(float value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float partial[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffU, value, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0F;
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  __syncthreads();  // partial may be written again
  return sum;
}

}  // namespace deltaic::cuda

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Fragments of 8 x 8 matrices of 16-bit elements: lane l holds row l / 4, columns 2 * (l % 4) and + 1.

namespace deltaic::cuda {

// Four matrices from shared memory; lane l names (as a shared address) row l % 8 of matrix l / 8.
__device__ inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ inline std::uint32_t transposed(std::uint32_t fragment) {
  std::uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
}

// 4 x 4 words of the four lanes that share a row, transposed: lane q (of 4) gets word q of each of them.
__device__ inline uint4 transposed_in_quad(const std::uint32_t (&words)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t other = __shfl_xor_sync(~0U, odd ? words[i] : words[i + 1], 1);
    pairs[i] = odd ? other : words[i], pairs[i + 1] = odd ? words[i + 1] : other;
  }
  const std::uint32_t first = __shfl_xor_sync(~0U, upper ? pairs[0] : pairs[2], 2);
  const std::uint32_t second = __shfl_xor_sync(~0U, upper ? pairs[1] : pairs[3], 2);
  return upper ? uint4{first, second, pairs[2], pairs[3]} : uint4{pairs[0], pairs[1], first, second};
}

// Two values rounded to T, the first in the low half.
template <class T>
__device__ std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <class T>
__device__ float2 unpack(std::uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000U)};
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

}  // namespace deltaic::cuda

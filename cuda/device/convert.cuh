#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <deltaic/tensor.h>

#include "cpp/src/check.h"

namespace deltaic::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Calls f(T{}) with the device type of f32, f16 or bf16. Throws InvalidArgument for another dtype.
template <class F>
void visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    default:
      DELTAIC_CHECK(false, "a tensor of dtype ", name(dtype), " where f32, f16 or bf16 is needed");
  }
}

// The same for f16 and bf16 alone.
template <class F>
void visit_half(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
    default:
      DELTAIC_CHECK(false, "a tensor of dtype ", name(dtype), " where f16 or bf16 is needed");
  }
}

}  // namespace deltaic::cuda

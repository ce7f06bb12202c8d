// Elementwise gates: a block a piece of a row, 4 elements a thread; bound by memory, 3 rows a token.
#include "cpp/src/ops/activation.h"

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;

template <class T>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const T* gate, std::int64_t gate_stride, const T* up, std::int64_t up_stride, std::int64_t size,
                    T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  gate += token * gate_stride, up += token * up_stride, y += token * y_stride;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const std::int64_t i = (std::int64_t{blockIdx.y} * kPerThread + j) * kThreads + threadIdx.x;
    if (i >= size) return;
    const float value = to_float(gate[i]);
    y[i] = from_float<T>(value / (1.0F + expf(-value)) * to_float(up[i]));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sigmoid_mul_kernel(const T* gate, std::int64_t token_stride, std::int64_t head_stride, std::int64_t dim,
                       std::int64_t size, T* x) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const std::int64_t i = (std::int64_t{blockIdx.y} * kPerThread + j) * kThreads + threadIdx.x;
    if (i >= size) return;
    const float value = to_float(gate[token * token_stride + i / dim * head_stride + i % dim]);
    x[token * size + i] = from_float<T>(to_float(x[token * size + i]) / (1.0F + expf(-value)));
  }
}

DependentLaunch launch_over(ops::Stream stream, std::int64_t num_tokens, std::int64_t size) {
  constexpr std::int64_t kPerBlock = kThreads * kPerThread;
  return {.grid = dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>((size + kPerBlock - 1) / kPerBlock)),
          .block = dim3(kThreads),
          .stream = native(stream)};
}

}  // namespace

void silu_mul(ops::Stream stream, TensorView gate, TensorView up, TensorView y) {
  visit_float(y.dtype, [&]<class T>(T) {
    launch_over(stream, y.shape[0], y.shape[1])(silu_mul_kernel<T>, static_cast<const T*>(gate.data), gate.stride[0],
                                                static_cast<const T*>(up.data), up.stride[0], y.shape[1],
                                                static_cast<T*>(y.data), y.stride[0]);
  });
}

void sigmoid_mul(ops::Stream stream, TensorView gate, TensorView x) {
  visit_float(x.dtype, [&]<class T>(T) {
    const std::int64_t size = x.shape[1] * x.shape[2];
    launch_over(stream, x.shape[0], size)(sigmoid_mul_kernel<T>, static_cast<const T*>(gate.data), gate.stride[0],
                                          gate.stride[1], x.shape[2], size, static_cast<T*>(x.data));
  });
}

}  // namespace deltaic::cuda

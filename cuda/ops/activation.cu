// Elementwise gates: a block a piece of a row, 4 elements a thread, or 8 beside each other; bound by memory, 3 rows a
// token.
#include "cpp/src/ops/activation.h"

#include <cstdint>
#include <type_traits>

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

constexpr int kVector = 8;

// The same with 16 bytes a thread, where rows are aligned to that: kVector elements, size a multiple of it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    silu_mul_vector_kernel(const T* gate, std::int64_t gate_stride, const T* up, std::int64_t up_stride,
                           std::int64_t size, T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  const std::int64_t column = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * kVector;
  if (column >= size) return;
  uint4 a = *reinterpret_cast<const uint4*>(gate + token * gate_stride + column);
  const uint4 b = *reinterpret_cast<const uint4*>(up + token * up_stride + column);
  T* values = reinterpret_cast<T*>(&a);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float value = to_float(values[j]);
    values[j] = from_float<T>(value / (1.0F + expf(-value)) * to_float(reinterpret_cast<const T*>(&b)[j]));
  }
  *reinterpret_cast<uint4*>(y + token * y_stride + column) = a;
}

bool is_aligned(const TensorView& view) {
  return view.dtype != DType::f32 && view.shape[1] % kVector == 0 && view.stride[0] % kVector == 0 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
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
    if constexpr (!std::is_same_v<T, float>)
      if (is_aligned(gate) && is_aligned(up) && is_aligned(y)) {
        constexpr std::int64_t kPerBlock = kThreads * kVector;
        const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(y.shape[0]),
                                                  static_cast<unsigned>((y.shape[1] + kPerBlock - 1) / kPerBlock)),
                                     .block = dim3(kThreads),
                                     .stream = native(stream)};
        return launch(silu_mul_vector_kernel<T>, static_cast<const T*>(gate.data), gate.stride[0],
                      static_cast<const T*>(up.data), up.stride[0], y.shape[1], static_cast<T*>(y.data), y.stride[0]);
      }
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

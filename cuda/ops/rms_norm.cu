// RMS norm over the last dimension, plain and gated by silu(z).
//   one block a row. Rows of up to 8,192 elements of f16 and bf16 stay in registers, 16 bytes a thread and step; others
//   are read twice, the second time mostly from L1 or L2
//   bound by memory: reads 1 row (gated: 2), writes 1     source: Zhang and Sennrich 2019, eq. 4
#include "cpp/src/ops/rms_norm.h"

#include <cstdint>
#include <type_traits>

#include "cuda/device/convert.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ float inverse_rms(const T* x, std::int64_t size, float eps) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    const float value = to_float(x[i]);
    sum += value * value;
  }
  return 1.0F / sqrtf(block_sum<kThreads>(sum) / static_cast<float>(size) + eps);
}

template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const T* x, std::int64_t x_stride, const float* weight,
                                                            float eps, std::int64_t size, T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  x += blockIdx.x * x_stride;
  y += blockIdx.x * y_stride;
  const float scale = inverse_rms(x, size, eps);
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) y[i] = from_float<T>(to_float(x[i]) * scale * weight[i]);
}

constexpr int kVector = 8;
constexpr std::int64_t kMaxVectors = 4;  // a thread

// kVectors vectors a thread; rows are aligned to 16 bytes, size is a multiple of kVector. The weights are read before
// the wait: no kernel writes them.
template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    short_rms_norm_kernel(const T* x, std::int64_t x_stride, const float* weight, float eps, int size, T* y,
                          std::int64_t y_stride) {
  float factors[kVectors][kVector];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (column >= size) break;
    *reinterpret_cast<float4*>(factors[i]) = __ldg(reinterpret_cast<const float4*>(weight + column));
    *reinterpret_cast<float4*>(factors[i] + 4) = __ldg(reinterpret_cast<const float4*>(weight + column + 4));
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  uint4 row[kVectors];
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    row[i] = column < size ? *reinterpret_cast<const uint4*>(x + blockIdx.x * x_stride + column) : uint4{};
    const T* values = reinterpret_cast<const T*>(&row[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += to_float(values[j]) * to_float(values[j]);
  }
  const float scale = 1.0F / sqrtf(block_sum<kThreads>(sum) / static_cast<float>(size) + eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (i * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (column >= size) break;
    T* values = reinterpret_cast<T*>(&row[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] = from_float<T>(to_float(values[j]) * scale * factors[i][j]);
    *reinterpret_cast<uint4*>(y + blockIdx.x * y_stride + column) = row[i];
  }
}

bool is_short(const TensorView& view) {
  return view.dtype != DType::f32 && view.shape[1] % kVector == 0 &&
         view.shape[1] <= kMaxVectors * kThreads * kVector && view.stride[0] % kVector == 0 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
}

struct HeadStrides {
  std::int64_t token, head;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(const T* x, HeadStrides x_stride, const T* z, HeadStrides z_stride, const float* weight,
                          float eps, int num_heads, std::int64_t dim, T* y, HeadStrides y_stride) {
  const std::int64_t token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
  x += token * x_stride.token + head * x_stride.head;
  z += token * z_stride.token + head * z_stride.head;
  y += token * y_stride.token + head * y_stride.head;
  const float scale = inverse_rms(x, dim, eps);
  for (std::int64_t i = threadIdx.x; i < dim; i += kThreads) {
    const float gate = to_float(z[i]);
    y[i] = from_float<T>(to_float(x[i]) * scale * weight[i] * (gate / (1.0F + expf(-gate))));
  }
}

}  // namespace

void rms_norm(ops::Stream stream, TensorView x, TensorView weight, float eps, TensorView y) {
  visit_float(x.dtype, [&]<class T>(T) {
    const DependentLaunch launch{
        .grid = dim3(static_cast<unsigned>(x.shape[0])), .block = dim3(kThreads), .stream = native(stream)};
    if constexpr (!std::is_same_v<T, float>) {
      const auto run = [&](auto kernel) {
        launch(kernel, static_cast<const T*>(x.data), x.stride[0], static_cast<const float*>(weight.data), eps,
               static_cast<int>(x.shape[1]), static_cast<T*>(y.data), y.stride[0]);
      };
      const bool is_aligned = reinterpret_cast<std::uintptr_t>(weight.data) % 16 == 0;
      if (is_aligned && is_short(x) && is_short(y)) {
        const std::int64_t num_vectors = (x.shape[1] + kThreads * kVector - 1) / (kThreads * kVector);
        return num_vectors == 1   ? run(short_rms_norm_kernel<T, 1>)
               : num_vectors == 2 ? run(short_rms_norm_kernel<T, 2>)
                                  : run(short_rms_norm_kernel<T, kMaxVectors>);
      }
    }
    launch(rms_norm_kernel<T>, static_cast<const T*>(x.data), x.stride[0], static_cast<const float*>(weight.data), eps,
           x.shape[1], static_cast<T*>(y.data), y.stride[0]);
  });
}

void gated_rms_norm(ops::Stream stream, TensorView x, TensorView z, TensorView weight, float eps, TensorView y) {
  visit_float(x.dtype, [&]<class T>(T) {
    const Launch launch{.grid = dim3(static_cast<unsigned>(x.shape[0] * x.shape[1])),
                        .block = dim3(kThreads),
                        .stream = native(stream)};
    launch(gated_rms_norm_kernel<T>, static_cast<const T*>(x.data), HeadStrides{x.stride[0], x.stride[1]},
           static_cast<const T*>(z.data), HeadStrides{z.stride[0], z.stride[1]}, static_cast<const float*>(weight.data),
           eps, static_cast<int>(x.shape[1]), x.shape[2], static_cast<T*>(y.data),
           HeadStrides{y.stride[0], y.stride[1]});
  });
}

}  // namespace deltaic::cuda

// y = x W^T + bias by the kernel that fits:
//   up to 16 tokens in f16 or bf16: streaming_linear      more: cuBLASLt, then the bias
//   f32, and sizes or alignments that neither takes: tiles of 64 tokens by 64 rows in shared memory, products and sums
//   in f32 without tensor cores, summed along in_features in order; bound by arithmetic
#include "cpp/src/ops/linear.h"

#include <cstdint>

#include "cpp/src/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/gemm/matmul.h"
#include "cuda/gemm/streaming_linear.h"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kPerThread = 4;

template <class T>
struct Matrix {
  T* data;
  std::int64_t stride;
  __device__ T& at(std::int64_t row, std::int64_t column) const { return data[row * stride + column]; }
};

template <class X, class W, class Y>
__global__ void __launch_bounds__(kThreads)
    plain_linear_kernel(Matrix<const X> x, Matrix<const W> weight, const float* bias, bool accumulate,
                        std::int64_t num_tokens, std::int64_t out_features, std::int64_t in_features, Matrix<Y> y) {
  __shared__ float x_tile[kDepth][kTile + 1], w_tile[kDepth][kTile + 1];
  const std::int64_t first_token = std::int64_t{blockIdx.y} * kTile, first_output = std::int64_t{blockIdx.x} * kTile;
  const int row = threadIdx.x / 16 * kPerThread, column = threadIdx.x % 16 * kPerThread;
  float sums[kPerThread][kPerThread] = {};
  for (std::int64_t k = 0; k < in_features; k += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
      const int r = i / kDepth, d = i % kDepth;
      const bool inside = k + d < in_features;
      x_tile[d][r] = inside && first_token + r < num_tokens ? to_float(x.at(first_token + r, k + d)) : 0.0F;
      w_tile[d][r] = inside && first_output + r < out_features ? to_float(weight.at(first_output + r, k + d)) : 0.0F;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) sums[i][j] += x_tile[d][row + i] * w_tile[d][column + j];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const std::int64_t token = first_token + row + i, output = first_output + column + j;
      if (token >= num_tokens || output >= out_features) continue;
      float value = sums[i][j] + (bias == nullptr ? 0.0F : bias[output]);
      if (accumulate) value += to_float(y.at(token, output));
      y.at(token, output) = from_float<Y>(value);
    }
}

template <class Y>
__global__ void __launch_bounds__(kThreads) add_bias_kernel(const float* bias, std::int64_t size, Matrix<Y> y) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) y.at(blockIdx.y, i) = from_float<Y>(to_float(y.at(blockIdx.y, i)) + bias[i]);
}

bool is_aligned(const TensorView& view) {
  const auto row_bytes = static_cast<std::size_t>(view.stride[0]) * size_of(view.dtype);
  return row_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
}

unsigned num_tiles(std::int64_t count, std::int64_t tile) { return static_cast<unsigned>((count + tile - 1) / tile); }

void plain_linear(ops::Stream stream, TensorView x, TensorView weight, const ops::LinearOptions& options,
                  TensorView y) {
  const auto launch = [&]<class X, class W, class Y>(X, W, Y) {
    const Launch run{.grid = dim3(num_tiles(y.shape[1], kTile), num_tiles(y.shape[0], kTile)),
                     .block = dim3(kThreads),
                     .stream = native(stream)};
    run(plain_linear_kernel<X, W, Y>, Matrix<const X>{static_cast<const X*>(x.data), x.stride[0]},
        Matrix<const W>{static_cast<const W*>(weight.data), weight.stride[0]},
        static_cast<const float*>(options.bias.data), options.accumulate, y.shape[0], y.shape[1], x.shape[1],
        Matrix<Y>{static_cast<Y*>(y.data), y.stride[0]});
  };
  if (x.dtype == DType::f32) return visit_float(weight.dtype, [&]<class W>(W) { launch(float{}, W{}, float{}); });
  visit_half(x.dtype, [&]<class T>(T) { y.dtype == DType::f32 ? launch(T{}, T{}, float{}) : launch(T{}, T{}, T{}); });
}

StreamingLinearArgs streaming_args(const TensorView& x, const ops::Weight& weight, const ops::LinearOptions& options,
                                   const TensorView& y) {
  return {.x = x,
          .weight = weight,
          .norm_weight = options.norm.weight,
          .eps = options.norm.eps,
          .bias = options.bias,
          .accumulate = options.accumulate,
          .silu_mul = options.silu_mul,
          .y = y};
}

}  // namespace

bool linear_fuses(TensorView x, const ops::Weight& weight) {
  return can_stream_linear(streaming_args(x, weight, {}, x));  // any y of x's dtype
}

void linear(ops::Stream stream, Matmul* matmul, TensorView x, const ops::Weight& weight,
            const ops::LinearOptions& options, TensorView y) {
  if (x.dtype == DType::f32 || x.dtype != weight.view.dtype) return plain_linear(stream, x, weight.view, options, y);
  const StreamingLinearArgs few = streaming_args(x, weight, options, y);
  if (can_stream_linear(few)) return streaming_linear(stream, few);
  if (!is_aligned(x) || !is_aligned(weight.view) || !is_aligned(y))
    return plain_linear(stream, x, weight.view, options, y);
  DELTAIC_CHECK(matmul != nullptr, "linear: ", x.shape[0], " tokens on CUDA need ops::Context::matmul");
  matmul->run(stream, x, weight.view, y, options.accumulate);
  if (options.bias.data == nullptr) return;
  visit_float(y.dtype, [&]<class Y>(Y) {
    const Launch run{.grid = dim3(num_tiles(y.shape[1], kThreads), static_cast<unsigned>(y.shape[0])),
                     .block = dim3(kThreads),
                     .stream = native(stream)};
    run(add_bias_kernel<Y>, static_cast<const float*>(options.bias.data), y.shape[1],
        Matrix<Y>{static_cast<Y*>(y.data), y.stride[0]});
  });
}

}  // namespace deltaic::cuda

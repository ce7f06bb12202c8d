// Mixture of experts for any dtype and size: the parity path of f32, and of sizes that the tensor-core kernels do not
// take.
//   up: a warp an element of a pair's intermediate row; down: a warp an element of y, which sums its token's experts in
//   order. Products and sums in f32; the order of a sum depends on sizes alone
#include "cuda/ops/moe_plain.h"

#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 8;
constexpr std::int64_t kMaxBlocks = 1 << 20;

template <class T>
struct Params {
  const T* x;
  std::int64_t x_stride;
  const T *gate_up, *down;
  const std::int32_t* expert_ids;
  const float* weights;
  std::int64_t num_tokens, k, num_experts, hidden, intermediate;
  float* scratch;  // [num_tokens * k, intermediate]
  T* y;
  std::int64_t y_stride;
};

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0U, value, mask);
  return value;
}

template <class A, class B>
__device__ float warp_dot(const A* a, const B* b, std::int64_t size) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x % 32; i < size; i += 32) sum += to_float(a[i]) * to_float(b[i]);
  return warp_sum(sum);
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32) moe_plain_up_kernel(Params<T> p) {
  const std::int64_t count = p.num_tokens * p.k * p.intermediate;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t pair = i / p.intermediate, output = i % p.intermediate;
    const std::int32_t id = p.expert_ids[pair];
    if (id < 0 || id >= p.num_experts) continue;
    const T* x = p.x + pair / p.k * p.x_stride;
    const T* row = p.gate_up + (id * 2 * p.intermediate + output) * p.hidden;
    const float gate = warp_dot(x, row, p.hidden), up = warp_dot(x, row + p.intermediate * p.hidden, p.hidden);
    if (threadIdx.x % 32 == 0) p.scratch[i] = gate / (1.0F + expf(-gate)) * up;
  }
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32) moe_plain_down_kernel(Params<T> p) {
  const std::int64_t count = p.num_tokens * p.hidden;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t token = i / p.hidden, output = i % p.hidden;
    T* y = p.y + token * p.y_stride + output;
    float sum = to_float(*y);
    for (std::int64_t pair = token * p.k; pair < (token + 1) * p.k; ++pair) {
      const std::int32_t id = p.expert_ids[pair];
      if (id < 0 || id >= p.num_experts) continue;
      sum += p.weights[pair] * warp_dot(p.scratch + pair * p.intermediate,
                                        p.down + (id * p.hidden + output) * p.intermediate, p.intermediate);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) *y = from_float<T>(sum);
  }
}

}  // namespace

void moe_plain(ops::Stream stream, TensorView x, TensorView gate_up, TensorView down, TensorView expert_ids,
               TensorView weights, TensorView scratch, TensorView y) {
  visit_float(x.dtype, [&]<class T>(T) {
    const Params<T> params{.x = static_cast<const T*>(x.data),
                           .x_stride = x.stride[0],
                           .gate_up = static_cast<const T*>(gate_up.data),
                           .down = static_cast<const T*>(down.data),
                           .expert_ids = static_cast<const std::int32_t*>(expert_ids.data),
                           .weights = static_cast<const float*>(weights.data),
                           .num_tokens = x.shape[0],
                           .k = expert_ids.shape[1],
                           .num_experts = gate_up.shape[0],
                           .hidden = x.shape[1],
                           .intermediate = down.shape[2],
                           .scratch = static_cast<float*>(scratch.data),
                           .y = static_cast<T*>(y.data),
                           .y_stride = y.stride[0]};
    const auto launch = [&](auto kernel, std::int64_t num_warps) {
      const std::int64_t num_blocks = std::min((num_warps + kWarps - 1) / kWarps, kMaxBlocks);
      const Launch run{
          .grid = dim3(static_cast<unsigned>(num_blocks)), .block = dim3(kWarps * 32), .stream = native(stream)};
      run(kernel, params);
    };
    launch(moe_plain_up_kernel<T>, params.num_tokens * params.k * params.intermediate);
    launch(moe_plain_down_kernel<T>, params.num_tokens * params.hidden);
  });
}

}  // namespace deltaic::cuda

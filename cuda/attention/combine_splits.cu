// Adds up the partial sums that the decode kernel leaves of requests with more than one split, in order of the splits.
//   one block a query row, a thread a channel; the first kBatch partial sums are read together with the statistics
//   bound by latency: reads num_splits rows of f32, writes one
#include "cuda/attention/decode_params.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kBatch = 16;  // loads in flight

// factor[s] = exp2(max_s - max) and 1 / (sum over s of sum_s factor[s]). One warp.
__device__ void weigh_splits(const float* stats, std::int64_t stride, int splits, float* factor, float* inverse_sum) {
  static_assert(ops::kMaxSplits <= 64);
  const int lane = threadIdx.x;
  float2 own[2];
  float max = -INFINITY, sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int split = lane + 32 * i;
    own[i] = split < splits ? *reinterpret_cast<const float2*>(stats + split * stride) : make_float2(-INFINITY, 0.0F);
    max = fmaxf(max, own[i].x);
  }
  for (int offset = 16; offset > 0; offset /= 2) max = fmaxf(max, __shfl_xor_sync(~0U, max, offset));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float weight = exp2f(own[i].x - max);
    if (lane + 32 * i < splits) factor[lane + 32 * i] = weight;
    sum += own[i].y * weight;
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0U, sum, offset);
  if (lane == 0) *inverse_sum = 1.0F / sum;
}

template <class T, int kDim>
__global__ void __launch_bounds__(kDim) combine_splits_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ float factor[ops::kMaxSplits], inverse_sum;
  const int rows = p.base.max_query_len * p.base.group, request = blockIdx.y;
  const int kv_head = static_cast<int>(blockIdx.x) / rows, row = static_cast<int>(blockIdx.x) % rows;
  const int query_begin = p.base.query_start_loc[request];
  const int query_len = p.base.query_start_loc[request + 1] - query_begin;
  const int splits = p.num_splits(request);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (splits < 2 || row >= query_len * p.base.group) return;

  const std::int64_t first = p.partial_row(request, 0, kv_head, row), stride = std::int64_t{p.base.num_kv_heads} * rows;
  const float* partial = p.partial + first * kDim + threadIdx.x;
  float batch[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) batch[i] = i < splits ? partial[i * stride * kDim] : 0.0F;
  const std::int64_t token = query_begin + row / p.base.group, head = kv_head * p.base.group + row % p.base.group;
  float gate = INFINITY;
  if (p.base.gate.data != nullptr)
    gate = to_float(static_cast<const T*>(
        p.base.gate.data)[token * p.base.gate.token_stride + head * p.base.gate.head_stride + threadIdx.x]);
  if (threadIdx.x < 32) weigh_splits(p.stats + first * 2, stride * 2, splits, factor, &inverse_sum);
  __syncthreads();
  float total = 0.0F;
  for (int begin = 0; begin < splits; begin += kBatch) {
    if (begin > 0) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) batch[i] = begin + i < splits ? partial[(begin + i) * stride * kDim] : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (begin + i < splits) total += factor[begin + i] * batch[i];
  }
  total *= inverse_sum / (1.0F + __expf(-gate));
  static_cast<T*>(p.base.out.data)[token * p.base.out.token_stride + head * p.base.out.head_stride + threadIdx.x] =
      from_float<T>(total);
}

template <class T, int kDim>
void launch_combine(cudaStream_t stream, const DecodeParams& params) {
  const AttentionParams& base = params.base;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(base.num_kv_heads * base.max_query_len * base.group),
                                            static_cast<unsigned>(base.num_reqs)),
                               .block = dim3(kDim),
                               .stream = stream};
  launch(combine_splits_kernel<T, kDim>, params);
}

}  // namespace

void combine_splits(cudaStream_t stream, const DecodeParams& params, DType dtype) {
  visit_half(dtype, [&]<class T>(T) {
    switch (params.base.head_dim) {
      case 64:
        return launch_combine<T, 64>(stream, params);
      case 128:
        return launch_combine<T, 128>(stream, params);
      default:
        return launch_combine<T, 256>(stream, params);
    }
  });
}

}  // namespace deltaic::cuda

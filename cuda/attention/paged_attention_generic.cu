// Paged attention for any dtypes and head_dim, without tensor cores: for f32 (parity) and unusual sizes.
//   one block a query token and head; a warp takes every kWarps-th key, its lanes the channels; the warps' sums are
//   merged in order
//   bound by the instructions of the dot products
#include <cmath>

#include "cuda/attention/attention_params.h"
#include "cuda/device/convert.cuh"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMaxDim = 512, kPerLane = kMaxDim / 32;

template <class T>
struct CacheRows {
  const T* data;
  std::int64_t block_stride, slot_stride, head_stride;

  __device__ const T* row(std::int64_t block, std::int64_t slot, std::int64_t head) const {
    return data + block * block_stride + slot * slot_stride + head * head_stride;
  }
};

// The request of a token, -1 for a token behind the last request.
__device__ int request_of(const AttentionParams& p, int token) {
  if (token >= p.query_start_loc[p.num_reqs]) return -1;
  int low = 0, high = p.num_reqs;  // the answer is the last i with query_start_loc[i] <= token
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.query_start_loc[middle] <= token ? low : high) = middle;
  }
  return low;
}

template <class T, class C>
__global__ void __launch_bounds__(kThreads)
    generic_attention_kernel(AttentionParams p, CacheRows<C> k_cache, CacheRows<C> v_cache) {
  __shared__ float shared_acc[kWarps][kMaxDim], shared_max[kWarps], shared_sum[kWarps];
  const int num_heads = p.num_kv_heads * p.group;
  const int token = static_cast<int>(blockIdx.x) / num_heads, head = static_cast<int>(blockIdx.x) % num_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int request = request_of(p, token);
  if (request < 0) return;
  const int num_keys = p.seq_lens[request] - (p.query_start_loc[request + 1] - token) + 1;
  const std::int32_t* blocks = p.block_table + request * p.table_stride;
  const T* q_row = static_cast<const T*>(p.q.data) + token * p.q.token_stride + head * p.q.head_stride;

  float q[kPerLane], acc[kPerLane], max = -INFINITY, sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int channel = lane + 32 * i;
    q[i] = channel < p.head_dim ? to_float(q_row[channel]) * p.scale : 0.0F;
    acc[i] = 0.0F;
  }
  for (int key = warp; key < num_keys; key += kWarps) {
    const std::int64_t block = blocks[key / p.block_size], slot = key % p.block_size;
    const C* k_row = k_cache.row(block, slot, head / p.group);
    const C* v_row = v_cache.row(block, slot, head / p.group);
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int channel = lane + 32 * i;
      if (channel < p.head_dim) score += q[i] * to_float(k_row[channel]);
    }
    for (int offset = 16; offset > 0; offset /= 2) score += __shfl_xor_sync(~0U, score, offset);
    const float new_max = fmaxf(max, score);
    const float kept = expf(max - new_max), weight = expf(score - new_max);
    max = new_max;
    sum = sum * kept + weight;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int channel = lane + 32 * i;
      if (channel < p.head_dim) acc[i] = acc[i] * kept + weight * to_float(v_row[channel]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) shared_acc[warp][lane + 32 * i] = acc[i];
  if (lane == 0) shared_max[warp] = max, shared_sum[warp] = sum;
  __syncthreads();

  float total_max = shared_max[0];
  for (int w = 1; w < kWarps; ++w) total_max = fmaxf(total_max, shared_max[w]);
  float factor[kWarps], total_sum = 0.0F;
  for (int w = 0; w < kWarps; ++w) {
    factor[w] = expf(shared_max[w] - total_max);  // 0 for a warp without keys
    total_sum += shared_sum[w] * factor[w];
  }
  T* out = static_cast<T*>(p.out.data) + token * p.out.token_stride + head * p.out.head_stride;
  const T* gate = static_cast<const T*>(p.gate.data);
  if (gate != nullptr) gate += token * p.gate.token_stride + head * p.gate.head_stride;
  for (int channel = threadIdx.x; channel < p.head_dim; channel += kThreads) {
    float value = 0.0F;
    for (int w = 0; w < kWarps; ++w) value += shared_acc[w][channel] * factor[w];
    value /= total_sum;
    if (gate != nullptr) value /= 1.0F + expf(-to_float(gate[channel]));
    out[channel] = from_float<T>(value);
  }
}

template <class T>
CacheRows<T> rows_of(const TensorView& cache) {
  return {static_cast<const T*>(cache.data), cache.stride[0], cache.stride[1], cache.stride[2]};
}

}  // namespace

void attention_generic(cudaStream_t stream, const AttentionParams& params, DType dtype, const TensorView& k_cache,
                       const TensorView& v_cache) {
  DELTAIC_CHECK(params.head_dim <= kMaxDim, "paged_attention: head_dim is ", params.head_dim, ", the most is ",
                kMaxDim);
  DELTAIC_CHECK(k_cache.dtype == v_cache.dtype, "paged_attention: k_cache is ", name(k_cache.dtype), ", v_cache is ",
                name(v_cache.dtype));
  const DependentLaunch launch{
      .grid = dim3(static_cast<unsigned>(params.num_tokens * params.num_kv_heads * params.group)),
      .block = dim3(kThreads),
      .stream = stream};
  visit_float(dtype, [&]<class T>(T) {
    visit_float(k_cache.dtype, [&]<class C>(C) {
      launch(generic_attention_kernel<T, C>, params, rows_of<C>(k_cache), rows_of<C>(v_cache));
    });
  });
}

}  // namespace deltaic::cuda

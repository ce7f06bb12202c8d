// Times one MoE layer of Qwen3.5-35B-A3B (256 experts, 8 a token, hidden 2048, intermediate 512) and checks it against
// the plain kernels.
//   bench_moe: device time of a layer in a graph, over layers larger than L2; share of the bound: distinct experts'
//   weights at 4.18 TB/s, or products at 800 TFLOP/s
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/gemm/moe_grouped.h"
#include "cuda/gemm/moe_streaming.h"
#include "cuda/ops/moe_plain.h"

using namespace deltaic;
using T = __nv_bfloat16;

namespace {

constexpr int kExperts = 256, kTopK = 8, kHidden = 2048, kIntermediate = 512;
constexpr std::size_t kUpSize = std::size_t{2} * kIntermediate * kHidden, kDownSize = kUpSize / 2;

__global__ void fill_kernel(T* data, std::size_t count, unsigned seed, float scale) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761U ^ seed;
    h ^= h >> 15, h *= 2246822519U, h ^= h >> 13;
    data[i] = __float2bfloat16((static_cast<float>(h & 0xFFFFU) / 65536.0F - 0.5F) * scale);
  }
}

template <class V>
V* device_memory(std::size_t count) {
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, count * sizeof(V)));
  cuda::check(cudaMemset(memory, 0xFF, count * sizeof(V)));  // NaN
  return static_cast<V*>(memory);
}

struct Layer {
  T *gate_up, *down;  // [kExperts + 1]: the last is the shared expert
};

double run(const std::vector<Layer>& layers, int num_tokens, bool streaming, bool shared) {
  const Device device{DeviceType::cuda, 0};
  T* x = device_memory<T>(std::size_t(num_tokens) * kHidden);
  T* y = device_memory<T>(std::size_t(num_tokens) * kHidden);
  T* expected = device_memory<T>(std::size_t(num_tokens) * kHidden);
  fill_kernel<<<256, 256>>>(x, std::size_t(num_tokens) * kHidden, 3, 3.0F);
  fill_kernel<<<256, 256>>>(y, std::size_t(num_tokens) * kHidden, 4, 2.0F);
  std::mt19937 rng(5);
  std::vector<int> all(kExperts), ids;
  std::iota(all.begin(), all.end(), 0);
  for (int t = 0; t < num_tokens; ++t) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.insert(ids.end(), all.begin(), all.begin() + kTopK);
  }
  const std::size_t distinct = std::set<int>(ids.begin(), ids.end()).size() + (shared ? 1 : 0);
  std::vector<float> weights(ids.size()), logits(num_tokens, 0.5F);
  for (auto& w : weights) w = std::uniform_real_distribution<float>(0.05F, 0.3F)(rng);
  int* d_ids = device_memory<int>(ids.size());
  float* d_weights = device_memory<float>(weights.size());
  float* d_logits = device_memory<float>(num_tokens);
  cuda::check(cudaMemcpy(d_ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
  cuda::check(cudaMemcpy(d_weights, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice));
  cuda::check(cudaMemcpy(d_logits, logits.data(), logits.size() * 4, cudaMemcpyHostToDevice));
  cuda::check(cudaMemcpy(expected, y, std::size_t(num_tokens) * kHidden * 2, cudaMemcpyDeviceToDevice));
  const std::size_t scratch_bytes =
      std::max(cuda::moe_streaming_scratch_bytes(num_tokens, kTopK, kIntermediate),
               cuda::moe_grouped_scratch_bytes(num_tokens, kTopK, kExperts, kHidden, kIntermediate));
  char* scratch = device_memory<char>(scratch_bytes);
  float* plain_scratch = device_memory<float>(std::size_t(num_tokens) * kTopK * kIntermediate);
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));

  const auto view = [&](void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return make_view(data, dtype, shape, device);
  };
  const auto layer_of = [&](const Layer& layer, T* into) {
    const TensorView vx = view(x, DType::bf16, {num_tokens, kHidden}),
                     vy = view(into, DType::bf16, {num_tokens, kHidden});
    const TensorView up = view(layer.gate_up, DType::bf16, {kExperts, 2 * kIntermediate, kHidden});
    const TensorView down = view(layer.down, DType::bf16, {kExperts, kHidden, kIntermediate});
    const TensorView vids = view(d_ids, DType::i32, {num_tokens, kTopK});
    const TensorView vw = view(d_weights, DType::f32, {num_tokens, kTopK});
    const TensorView vs = view(scratch, DType::u8, {static_cast<std::int64_t>(scratch_bytes)});
    if (streaming) {
      cuda::MoeStreamingArgs args{.x = vx,
                                  .norm_weight = {},
                                  .gate_up = up,
                                  .down = down,
                                  .expert_ids = vids,
                                  .weights = vw,
                                  .shared_gate_up = {},
                                  .shared_down = {},
                                  .shared_logits = {},
                                  .scratch = vs,
                                  .y = vy};
      if (shared) {
        args.shared_gate_up = view(layer.gate_up + kExperts * kUpSize, DType::bf16, {2 * kIntermediate, kHidden});
        args.shared_down = view(layer.down + kExperts * kDownSize, DType::bf16, {kHidden, kIntermediate});
        args.shared_logits = view(d_logits, DType::f32, {num_tokens});
      }
      cuda::moe_streaming({stream}, args);
    } else {
      cuda::moe_grouped(
          {stream}, {.x = vx, .gate_up = up, .down = down, .expert_ids = vids, .weights = vw, .scratch = vs, .y = vy});
    }
  };
  cuda::check(cudaDeviceSynchronize());
  layer_of(layers[0], y);
  cuda::check(cudaStreamSynchronize(stream));
  const int checked = std::min(num_tokens, 64);
  cuda::moe_plain({stream}, view(x, DType::bf16, {checked, kHidden}),
                  view(layers[0].gate_up, DType::bf16, {kExperts, 2 * kIntermediate, kHidden}),
                  view(layers[0].down, DType::bf16, {kExperts, kHidden, kIntermediate}),
                  view(d_ids, DType::i32, {checked, kTopK}), view(d_weights, DType::f32, {checked, kTopK}),
                  view(plain_scratch, DType::f32, {checked * kTopK, kIntermediate}),
                  view(expected, DType::bf16, {checked, kHidden}));
  if (shared) {  // one more expert, the same for all tokens
    std::vector<int> one(checked, kExperts);
    std::vector<float> w(checked, 1.0F / (1.0F + std::exp(-0.5F)));
    int* one_ids = device_memory<int>(checked);
    float* one_weights = device_memory<float>(checked);
    cuda::check(cudaMemcpy(one_ids, one.data(), checked * 4, cudaMemcpyHostToDevice));
    cuda::check(cudaMemcpy(one_weights, w.data(), checked * 4, cudaMemcpyHostToDevice));
    cuda::moe_plain({stream}, view(x, DType::bf16, {checked, kHidden}),
                    view(layers[0].gate_up, DType::bf16, {kExperts + 1, 2 * kIntermediate, kHidden}),
                    view(layers[0].down, DType::bf16, {kExperts + 1, kHidden, kIntermediate}),
                    view(one_ids, DType::i32, {checked, 1}), view(one_weights, DType::f32, {checked, 1}),
                    view(plain_scratch, DType::f32, {checked, kIntermediate}),
                    view(expected, DType::bf16, {checked, kHidden}));
    cuda::check(cudaStreamSynchronize(stream));
    cudaFree(one_ids), cudaFree(one_weights);
  }
  cuda::check(cudaStreamSynchronize(stream));
  std::vector<T> got(std::size_t(checked) * kHidden), want(got.size());
  cuda::check(cudaMemcpy(got.data(), y, got.size() * 2, cudaMemcpyDeviceToHost));
  cuda::check(cudaMemcpy(want.data(), expected, want.size() * 2, cudaMemcpyDeviceToHost));
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double a = __bfloat162float(got[i]), b = __bfloat162float(want[i]);
    difference += (a - b) * (a - b), norm += b * b;
  }
  const double error = std::sqrt(difference / norm);

  const double us = time_in_graph(stream, 16, [&](int i) {
                      layer_of(layers[static_cast<std::size_t>(i) % layers.size()], y);
                    }).median_us;
  const double memory_us = static_cast<double>(distinct) * (kUpSize + kDownSize) * 2 / 4.18e6;
  const double flops = 2.0 * num_tokens * (kTopK + (shared ? 1 : 0)) * (kUpSize + kDownSize);
  const double bound = std::max(memory_us, flops / 800e6);
  std::printf("%-10s %5d tokens%s  %3zu experts  %9.2f us  bound %8.2f  %5.1f %%  %6.1f TFLOP/s  error %.5f%s\n",
              streaming ? "streaming" : "grouped", num_tokens, shared ? " + shared" : "         ", distinct, us, bound,
              bound / us * 100, flops / us * 1e-6, error, error < 0.01 ? "" : "  WRONG");
  cudaStreamDestroy(stream);
  for (void* memory : {(void*)x, (void*)y, (void*)expected, (void*)d_ids, (void*)d_weights, (void*)d_logits,
                       (void*)scratch, (void*)plain_scratch})
    cudaFree(memory);
  return error < 0.01 ? 0.0 : 1.0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int only = argc > 1 ? std::atoi(argv[1]) : 0;  // the grouped kernels for so many tokens, once

  std::vector<Layer> layers(6);
  unsigned seed = 1;
  for (Layer& layer : layers) {
    layer.gate_up = device_memory<T>((kExperts + 1) * kUpSize);
    layer.down = device_memory<T>((kExperts + 1) * kDownSize);
    fill_kernel<<<2048, 256>>>(layer.gate_up, (kExperts + 1) * kUpSize, seed++, 0.1F);
    fill_kernel<<<2048, 256>>>(layer.down, (kExperts + 1) * kDownSize, seed++, 0.1F);
  }
  cuda::check(cudaDeviceSynchronize());
  double wrong = 0.0;
  if (only > 0) return run(layers, only, false, false) > 0.0;
  for (int num_tokens : {1, 2, 4, 8, 16}) wrong += run(layers, num_tokens, true, false);
  for (int num_tokens : {1, 8}) wrong += run(layers, num_tokens, true, true);
  for (int num_tokens : {8, 16, 32, 64, 128, 512, 2048, 8192}) wrong += run(layers, num_tokens, false, false);
  return wrong > 0.0;
}

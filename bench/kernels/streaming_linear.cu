// Times streaming_linear on the shapes of Qwen3.5-35B-A3B and checks it against a float64 product.
//   bench_streaming_linear: device time of a launch in a graph, over buffers larger than L2; share of a 4.18 TB/s copy
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cuda/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/gemm/streaming_linear.h"

using namespace deltaic;
using T = __nv_bfloat16;

namespace {

struct Case {
  const char* name;
  int out_features, in_features;
  bool norm, accumulate, silu_mul;
};

void* device_copy(const void* host, std::size_t bytes) {
  void* device = nullptr;
  cuda::check(cudaMalloc(&device, bytes));
  cuda::check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
  return device;
}

__global__ void fill_kernel(T* data, std::size_t count, unsigned seed) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761U ^ seed;
    h ^= h >> 15, h *= 2246822519U, h ^= h >> 13;
    data[i] = __float2bfloat16((static_cast<float>(h & 0xFFFFU) / 65536.0F - 0.5F) * 0.1F);
  }
}

double run(const Case& c, int num_tokens) {
  const std::size_t weight_elements = static_cast<std::size_t>(c.out_features) * c.in_features;
  const int num_copies = static_cast<int>(std::max<std::size_t>(2, (std::size_t{256} << 20) / (weight_elements * 2)));
  T* weights = nullptr;
  cuda::check(cudaMalloc(&weights, weight_elements * 2 * num_copies));
  fill_kernel<<<2048, 256>>>(weights, weight_elements * num_copies, 7);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<T> x(static_cast<std::size_t>(num_tokens) * c.in_features);
  for (auto& v : x) v = __float2bfloat16(normal(rng));
  std::vector<float> norm(c.in_features);
  for (auto& v : norm) v = 1.0F + 0.1F * normal(rng);
  const int y_columns = c.silu_mul ? c.out_features / 2 : c.out_features;
  std::vector<T> y0(static_cast<std::size_t>(num_tokens) * y_columns);
  for (auto& v : y0) v = __float2bfloat16(normal(rng));
  void* dx = device_copy(x.data(), x.size() * 2);
  void* dn = device_copy(norm.data(), norm.size() * 4);
  void* dy = device_copy(y0.data(), y0.size() * 2);
  const Device device{DeviceType::cuda, 0};
  cuda::StreamingLinearArgs args{
      .x = make_view(dx, DType::bf16, {num_tokens, c.in_features}, device),
      .weight = {make_view(weights, DType::bf16, {c.out_features, c.in_features}, device), nullptr},
      .norm_weight = {},
      .eps = 1e-6F,
      .bias = {},
      .accumulate = c.accumulate,
      .silu_mul = c.silu_mul,
      .y = make_view(dy, DType::bf16, {num_tokens, y_columns}, device)};
  if (c.norm) args.norm_weight = make_view(dn, DType::f32, {c.in_features}, device);
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream));
  cuda::check(cudaDeviceSynchronize());
  cuda::streaming_linear({stream}, args);
  cuda::check(cudaStreamSynchronize(stream));

  std::vector<T> w(weight_elements), y(y0.size());
  cuda::check(cudaMemcpy(w.data(), weights, weight_elements * 2, cudaMemcpyDeviceToHost));
  cuda::check(cudaMemcpy(y.data(), dy, y.size() * 2, cudaMemcpyDeviceToHost));
  double worst = 0.0;
  for (int token = 0; token < num_tokens; ++token) {
    double square = 0.0;
    for (int k = 0; k < c.in_features; ++k) square += std::pow(__bfloat162float(x[token * c.in_features + k]), 2);
    const double scale = c.norm ? 1.0 / std::sqrt(square / c.in_features + 1e-6) : 1.0;
    const auto dot = [&](int row) {
      double sum = 0.0;
      for (int k = 0; k < c.in_features; ++k)
        sum += static_cast<double>(__bfloat162float(w[static_cast<std::size_t>(row) * c.in_features + k])) *
               __bfloat162float(x[token * c.in_features + k]) * (c.norm ? norm[k] : 1.0F);
      return sum * scale;
    };
    for (int column = token % 37; column < y_columns; column += 37) {
      double expected = dot(column);
      if (c.silu_mul) expected = expected / (1.0 + std::exp(-expected)) * dot(column + y_columns);
      if (c.accumulate) expected += __bfloat162float(y0[static_cast<std::size_t>(token) * y_columns + column]);
      const double got = __bfloat162float(y[static_cast<std::size_t>(token) * y_columns + column]);
      worst = std::max(worst, std::abs(got - expected) / (std::abs(expected) + 0.5));
    }
  }

  const double us = time_in_graph(stream, 64, [&](int i) {
                      args.weight.view.data = weights + weight_elements * (i % num_copies);
                      cuda::streaming_linear({stream}, args);
                    }).median_us;
  const double gbs = weight_elements * 2.0 / us * 1e-3;
  std::printf("%-22s %2d tokens  %6d x %5d  %8.2f us  %6.0f GB/s  %5.1f %%  error %.4f%s\n", c.name, num_tokens,
              c.out_features, c.in_features, us, gbs, gbs / 4180 * 100, worst, worst > 0.04 ? "  WRONG" : "");
  cudaStreamDestroy(stream);
  cudaFree(weights), cudaFree(dx), cudaFree(dn), cudaFree(dy);
  return worst;
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Case cases[] = {
      {"gdn in-projection", 12352, 2048, true, false, false}, {"gdn out-projection", 2048, 4096, false, true, false},
      {"attention qkv", 9216, 2048, true, false, false},      {"router", 256, 2048, true, false, false},
      {"shared expert up", 1024, 2048, false, false, true},   {"shared expert down", 2048, 512, false, true, false},
      {"lm_head", 248320, 2048, true, false, false},          {"4B mlp up", 18432, 2560, true, false, true},
      {"4B mlp down", 2560, 9216, false, true, false},        {"0.8B in-projection", 8224, 1024, true, false, false}};
  bool wrong = false;
  for (const Case& c : cases)
    for (int num_tokens : {1, 8, 16})
      if (num_tokens * c.in_features <= 16 * 4096 || num_tokens <= 8) wrong |= run(c, num_tokens) > 0.04;
  return wrong;
}

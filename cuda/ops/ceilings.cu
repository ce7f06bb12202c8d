// What a GPU can do at most: a sum over memory that no cache holds, and a large product.
#include "cpp/src/ops/ceilings.h"

#include <algorithm>
#include <functional>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/upload.h"
#include "cpp/src/ops/linear.h"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 512, kBlocksPerProcessor = 4, kLoads = 8, kPasses = 20;
constexpr std::int64_t kReadBytes = std::int64_t{1} << 30;  // many times the largest L2
constexpr std::int64_t kMatrixSize = 8192;

// Each thread keeps kLoads reads of 16 bytes in flight.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, std::int64_t count, unsigned* sink) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  unsigned sum = 0;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += kLoads * stride) {
    uint4 values[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) values[j] = i + j * stride < count ? __ldcs(data + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += values[j].x ^ values[j].y ^ values[j].z ^ values[j].w;
  }
  if (sum == 0xFFFFFFFFU) *sink = sum;  // never, but the compiler does not know
}

// Seconds of the fastest of several runs, after a first one.
double fastest(cudaStream_t stream, const std::function<void()>& enqueue) {
  const auto make_event = [] {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event));
    return UniqueEvent(event);
  };
  const UniqueEvent start = make_event(), end = make_event();
  float best = 0.0F;
  for (int pass = 0; pass <= kPasses; ++pass) {
    check(cudaEventRecord(start.get(), stream));
    enqueue();
    check(cudaEventRecord(end.get(), stream));
    check(cudaEventSynchronize(end.get()));
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, start.get(), end.get()));
    if (pass > 0) best = pass == 1 ? ms : std::min(best, ms);
  }
  return 1e-3 * static_cast<double>(best);
}

}  // namespace

double measure_read_bandwidth(int device_index) {
  const DeviceGuard device(device_index);
  const Device where{DeviceType::cuda, device_index};
  const Tensor memory(DType::i32, {kReadBytes / 4}, where), sink(DType::i32, {1}, where);
  check(cudaMemsetAsync(memory.view().data, 1, kReadBytes, nullptr));
  const Launch launch{.grid = dim3(static_cast<unsigned>(num_multiprocessors(device_index) * kBlocksPerProcessor)),
                      .block = dim3(kThreads),
                      .stream = nullptr};
  const double seconds = fastest(nullptr, [&] {
    launch(read_kernel, static_cast<const uint4*>(memory.view().data), kReadBytes / 16,
           static_cast<unsigned*>(sink.view().data));
  });
  return 1e-9 * static_cast<double>(kReadBytes) / seconds;
}

double measure_matrix_peak(int device_index) {
  const DeviceGuard device(device_index);
  const Device where{DeviceType::cuda, device_index};
  const auto matmul = make_matmul(device_index);
  const ops::Context ctx{.device = where, .stream = {}, .threads = nullptr, .matmul = matmul.get()};
  const auto random = [&](std::uint64_t seed) {
    Tensor tensor(DType::bf16, {kMatrixSize, kMatrixSize}, where);
    fill_uniform(tensor.view(), seed, 0.0F, 1.0F);
    return tensor;
  };
  const Tensor x = random(1), w = random(2), y(DType::bf16, {kMatrixSize, kMatrixSize}, where);
  const ops::Weight weight{.view = w.view(), .owner = nullptr};
  const double seconds = fastest(nullptr, [&] { ops::linear(ctx, x.view(), weight, y.view()); });
  return 1e-9 * 2.0 * static_cast<double>(kMatrixSize * kMatrixSize * kMatrixSize) / seconds;
}

}  // namespace deltaic::cuda

// Chooses a token for each row of logits, and keeps the state of its slot.
//   a cluster of blocks a row, each with a chunk of it; cluster barriers where the row must be known as a whole
//   greedy reads a row once; a draw without filters too (max and draw in one pass); top-k and top-p read it three times
//   (max, histogram, collect), changed logits once more; all but the first from L2 where it holds the rows
//   bound by memory: the logits once
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"
#include "cuda/ops/sampler_row.cuh"
#include "cuda/ops/sampler_state.h"

namespace deltaic::cuda {
namespace {

using namespace sampler_detail;

__global__ void __launch_bounds__(kThreads, 2) greedy_sample_kernel(SampleParams p) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  sample_greedy_row(s, p, blockIdx.y);
}

__global__ void __launch_bounds__(kThreads, 2) sample_kernel(SampleParams p) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  sample_row(s, p, blockIdx.y);
}

__global__ void add_tokens_kernel(AddedTokensParams p) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= p.num_rows || p.slots[row] < 0) return;
  const SamplerSlot slot = p.table[p.slots[row]];
  const int count = p.counts[row], position = p.output_positions[row] - count;
  for (int i = 0; i < count; ++i) add_token(slot, position + i, p.token_ids[row * p.columns + i]);
}

}  // namespace

int max_sampler_cluster(int device_index) {
  const DeviceGuard guard(device_index);
  if (!has_clusters(device_index)) return 1;
  int most = kMaxCluster;
  for (auto* kernel : {greedy_sample_kernel, sample_kernel}) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kMaxCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kMaxCluster), config.blockDim = dim3(kThreads);
    config.attrs = &attribute, config.numAttrs = 1;
    int num_clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config) != cudaSuccess) {
      (void)cudaGetLastError();  // a device without clusters of this size says so by an error
      num_clusters = 0;
    }
    if (num_clusters == 0) most = 8;
  }
  return most;
}

void launch_sampler(cudaStream_t stream, const SampleParams& params, std::int64_t num_rows, bool all_greedy,
                    int cluster) {
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(cluster), static_cast<unsigned>(num_rows)),
                               .block = dim3(kThreads),
                               .stream = stream,
                               .cluster = static_cast<unsigned>(cluster)};
  launch(all_greedy ? greedy_sample_kernel : sample_kernel, params);
}

void launch_add_tokens(cudaStream_t stream, const AddedTokensParams& params) {
  constexpr int kRows = 64;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((params.num_rows + kRows - 1) / kRows)),
                               .block = dim3(kRows),
                               .stream = stream};
  launch(add_tokens_kernel, params);
}

}  // namespace deltaic::cuda

// What the host knows of a step, spread over the arrays that the ops read; and what it sampled, on its way back.
//   upload: a block a row for its block table, and blocks of kUnroll x kThreads elements for everything else
//   bound by the latency of reads over PCIe, which all are independent
#include "cpp/src/runner/step_kernels.h"

#include <algorithm>

#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256, kUnroll = 4;

__device__ void take_blocks(const StepUpload& step, int row) {
  const int slot = step.row_slots[row];
  if (slot < 0) return;
  const int num_known = step.num_known[row], begin = step.new_begin[row], num_new = step.new_begin[row + 1] - begin;
  std::int32_t* kept = step.slot_tables + slot * step.row_stride;
  std::int32_t* table = step.block_table + row * step.row_stride;
  for (int i = threadIdx.x; i < num_known; i += kThreads) table[i] = kept[i];
  for (int i = threadIdx.x; i < num_new; i += kThreads)
    kept[num_known + i] = table[num_known + i] = step.new_blocks[begin + i];
}

__global__ void __launch_bounds__(kThreads) upload_step_kernel(const __grid_constant__ StepUpload step) {
  if (static_cast<int>(blockIdx.x) < step.num_rows) return take_blocks(step, blockIdx.x);
  const std::int64_t first = std::int64_t{blockIdx.x - step.num_rows} * kThreads * kUnroll + threadIdx.x;
  const auto* source = reinterpret_cast<const uint4*>(step.source);
  auto* target = reinterpret_cast<uint4*>(step.target);
  const std::int64_t num_units = step.num_bytes / 16;
  uint4 units[kUnroll];
  int ids[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const std::int64_t at = first + i * kThreads;
    if (at < num_units) units[i] = source[at];
    if (at < step.num_tokens) ids[i] = step.source_ids[at];
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const std::int64_t at = first + i * kThreads;
    if (at < num_units) target[at] = units[i];
    if (at >= step.num_tokens) continue;
    const int id = ids[i] >= 0 ? ids[i] : ids[i] == StepUpload::kNoToken ? -1 : step.kept_tokens[~ids[i]];
    if (step.token_ids != nullptr) step.token_ids[at] = id;
    step.input_ids[at] = max(id, 0);
  }
}

__global__ void __launch_bounds__(kThreads) commit_tokens_kernel(const TokenCommit tokens) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  if (row >= tokens.num_rows) return;
  const std::int32_t token = tokens.token_ids[row];
  tokens.last_sampled[tokens.slots[row]] = token;
  tokens.host_token_ids[row] = token;
  tokens.host_is_finite[row] = tokens.is_finite[row];
}

unsigned num_blocks(std::int64_t num_elements, int per_block) {
  return static_cast<unsigned>((num_elements + per_block - 1) / per_block);
}

}  // namespace

void upload_step(ops::Stream stream, const StepUpload& step) {
  const std::int64_t num_elements = std::max<std::int64_t>(step.num_bytes / 16, step.num_tokens);
  const Launch launch{.grid = dim3(static_cast<unsigned>(step.num_rows) + num_blocks(num_elements, kThreads * kUnroll)),
                      .block = dim3(kThreads),
                      .stream = native(stream)};
  launch(upload_step_kernel, step);
}

void commit_tokens(ops::Stream stream, const TokenCommit& tokens) {
  const DependentLaunch launch{
      .grid = dim3(num_blocks(tokens.num_rows, kThreads)), .block = dim3(kThreads), .stream = native(stream)};
  launch(commit_tokens_kernel, tokens);
}

}  // namespace deltaic::cuda

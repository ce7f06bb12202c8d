// Steps with drafts: where each row stands, what of it was accepted, and what the draft module reads.
//   place: a warp a row; verify: a block a row; take: a thread a row; all bound by latency
#include "cpp/src/runner/draft_kernels.h"

#include "cpp/src/runner/draft_rules.h"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 128;

__global__ void __launch_bounds__(kWarps * 32) place_tokens_kernel(const __grid_constant__ PlaceTokens args) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= args.rows.num_rows || args.rows.slots[row] < 0) return;
  const int shift = shift_of(args, row);
  __syncwarp();  // what follows may reset what it was computed from
  if (row < args.rows.num_verified)
    for (int j = static_cast<int>(threadIdx.x) % 32; j < num_tokens_of(args.rows, row); j += 32)
      place_token(args, row, j, shift);
  if (threadIdx.x % 32 == 0) place_row(args, row, shift);
}

__global__ void __launch_bounds__(kThreads) verify_tokens_kernel(const __grid_constant__ VerifyTokens args) {
  __shared__ VerifiedRow verified;
  const auto row = static_cast<int>(blockIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x == 0) verified = verify_row(args, row);
  __syncthreads();
  const int first = args.rows.query_start_loc[row];
  for (int j = static_cast<int>(threadIdx.x); j < num_tokens_of(args.rows, row); j += kThreads)
    args.shifted_ids[first + j] = shifted_id(args, row, j, verified);
}

__global__ void __launch_bounds__(kThreads) take_draft_kernel(const __grid_constant__ TakeDraft args) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row < args.rows.num_rows) take_draft_of_row(args, row);
}

__global__ void __launch_bounds__(kThreads) copy_words_kernel(const std::uint32_t* from, std::uint32_t* to, int count) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (i < count) to[i] = from[i];
}

DependentLaunch launch_of(ops::Stream stream, int num_blocks, int num_threads) {
  return {.grid = dim3(static_cast<unsigned>(num_blocks)),
          .block = dim3(static_cast<unsigned>(num_threads)),
          .stream = native(stream)};
}

}  // namespace

void place_tokens(ops::Stream stream, const PlaceTokens& args) {
  launch_of(stream, (args.rows.num_rows + kWarps - 1) / kWarps, kWarps * 32)(place_tokens_kernel, args);
}

void verify_tokens(ops::Stream stream, const VerifyTokens& args) {
  launch_of(stream, args.rows.num_rows, kThreads)(verify_tokens_kernel, args);
}

void take_draft(ops::Stream stream, const TakeDraft& args) {
  launch_of(stream, (args.rows.num_rows + kThreads - 1) / kThreads, kThreads)(take_draft_kernel, args);
}

void copy_words(ops::Stream stream, const void* from, void* to, std::int64_t num_words) {
  const auto count = static_cast<int>(num_words);
  launch_of(stream, (count + kThreads - 1) / kThreads, kThreads)(
      copy_words_kernel, static_cast<const std::uint32_t*>(from), static_cast<std::uint32_t*>(to), count);
}

}  // namespace deltaic::cuda

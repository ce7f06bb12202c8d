// Mixture of experts for many tokens, as grouped matrix products on tensor cores (wgmma, sm_90a).
//   sort: blocks count the (token, j) pairs of each expert, then place them, an expert after the other, and cut each
//   expert into tiles as equal as can be (one block does all that for up to 4,096 pairs); nothing comes back to the
//   host. Where a pair lies does not change what it gives
//   up, then down: moe_product
//   sum: a block a token adds its experts in order
#include "cuda/gemm/moe_grouped.h"

#include <algorithm>

#include "cpp/src/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/gemm/moe_product.h"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kSortThreads = 1024, kPairsPerBlock = 4096;
constexpr int kMaxSortedExperts = kSortThreads;
constexpr int kColumns = 64;  // sizes are multiples of it

// Parts of the scratch memory.
struct Scratch {
  std::int32_t* num_tiles;
  std::int32_t* counts;  // [blocks of kPairsPerBlock pairs, num_experts]
  MoePairTile* tiles;
  std::int32_t* sorted_pairs;  // [num_pairs]
  void* hidden;                // [num_pairs, intermediate] in sorted order
  void* out;                   // [num_pairs, hidden] in the order of pairs
  std::size_t num_bytes;
};

std::int64_t num_sort_blocks(std::int64_t num_pairs) { return (num_pairs + kPairsPerBlock - 1) / kPairsPerBlock; }

Scratch lay_out(void* base, std::int64_t num_pairs, std::int64_t num_experts, std::int64_t hidden,
                std::int64_t intermediate) {
  std::size_t offset = 0;
  const auto take = [&](std::int64_t num_bytes) {
    void* part = static_cast<char*>(base) + offset;
    offset += (static_cast<std::size_t>(num_bytes) + 255) / 256 * 256;
    return part;
  };
  Scratch scratch{};
  scratch.num_tiles = static_cast<std::int32_t*>(take(4));
  scratch.counts = static_cast<std::int32_t*>(take(num_sort_blocks(num_pairs) * num_experts * 4));
  scratch.tiles = static_cast<MoePairTile*>(
      take((num_pairs / kMoeBlockPairs + num_experts) * static_cast<std::int64_t>(sizeof(MoePairTile))));
  scratch.sorted_pairs = static_cast<std::int32_t*>(take(num_pairs * 4));
  scratch.hidden = take(num_pairs * intermediate * 2);
  scratch.out = take(num_pairs * hidden * 2);
  scratch.num_bytes = offset;
  return scratch;
}

// Pairs of block `blockIdx.x`: f(pair, expert) for those with a valid expert. Four a thread, all loads at once.
template <class F>
__device__ void visit_pairs(const std::int32_t* expert_ids, int num_pairs, int num_experts, F&& f) {
  const int first = blockIdx.x * kPairsPerBlock + threadIdx.x;
  int ids[kPairsPerBlock / kSortThreads];
#pragma unroll
  for (int i = 0; i < kPairsPerBlock / kSortThreads; ++i)
    ids[i] = first + i * kSortThreads < num_pairs ? __ldcg(expert_ids + first + i * kSortThreads) : -1;
#pragma unroll
  for (int i = 0; i < kPairsPerBlock / kSortThreads; ++i)
    if (0 <= ids[i] && ids[i] < num_experts) f(first + i * kSortThreads, ids[i]);
}

// Counts the pairs of each expert among those of this block: scratch.counts[block].
__global__ void __launch_bounds__(kSortThreads)
    moe_count_kernel(const std::int32_t* expert_ids, int num_pairs, int num_experts, Scratch scratch) {
  __shared__ int count[kSortThreads];
  const int thread = threadIdx.x;
  count[thread] = 0;
  wait_for_previous_kernel();
  allow_next_kernel();
  __syncthreads();
  visit_pairs(expert_ids, num_pairs, num_experts, [&](int, int id) { atomicAdd(&count[id], 1); });
  __syncthreads();
  if (thread < num_experts) scratch.counts[blockIdx.x * num_experts + thread] = count[thread];
}

// Places this block's pairs, and in block 0 lists the tiles. A block alone counts for itself; of several every one adds
// up all counts anew.
template <bool kAlone>
__global__ void __launch_bounds__(kSortThreads) moe_place_kernel(const std::int32_t* expert_ids, int num_pairs,
                                                                 int num_experts, int max_tile_pairs, Scratch scratch) {
  __shared__ int next[kSortThreads];  // where the next pair of an expert goes
  const int thread = threadIdx.x;
  if constexpr (kAlone) {
    next[thread] = 0;
    __syncthreads();
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  int all = 0, before = 0;
  if constexpr (kAlone) {
    visit_pairs(expert_ids, num_pairs, num_experts, [&](int, int id) { atomicAdd(&next[id], 1); });
    __syncthreads();
    all = next[thread];
  } else if (thread < num_experts) {
#pragma unroll 8
    for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
      const int count = __ldcg(scratch.counts + block * num_experts + thread);
      all += count;
      if (block < static_cast<int>(blockIdx.x)) before += count;
    }
  }
  const int begin = inclusive_block_sum<kSortThreads>(all) - all;
  next[thread] = begin + before;
  __syncthreads();
  visit_pairs(expert_ids, num_pairs, num_experts,
              [&](int pair, int id) { scratch.sorted_pairs[atomicAdd(&next[id], 1)] = pair; });
  if (blockIdx.x > 0) return;
  const int num_tiles = (all + max_tile_pairs - 1) / max_tile_pairs;
  const int tile_end = inclusive_block_sum<kSortThreads>(num_tiles);
  for (int i = 0; i < num_tiles; ++i) {
    const auto first = static_cast<int>(std::int64_t{all} * i / num_tiles);
    const auto end = static_cast<int>(std::int64_t{all} * (i + 1) / num_tiles);
    scratch.tiles[tile_end - num_tiles + i] = {
        .expert = thread, .begin = begin + first, .count = end - first, .padding = 0};
  }
  if (thread == kSortThreads - 1) *scratch.num_tiles = tile_end;
}

constexpr int kSumThreads = 256;

// Pairs are added in order. y, ids and weights are older than the kernel just before: they are read while it runs.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    moe_sum_kernel(const T* out, const std::int32_t* expert_ids, const float* weights, int num_experts, int k,
                   int hidden, T* y, std::int64_t y_stride) {
  constexpr int kAtOnce = 9;  // experts whose loads are under way together: eight and a shared one
  const std::int64_t token = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool waits = true;
  for (int begin = 0; begin < hidden; begin += kSumThreads * 8) {  // all lanes, for they exchange ids
    const int column = begin + static_cast<int>(threadIdx.x) * 8;
    const bool is_inside = column < hidden;
    T* target = y + token * y_stride + column;
    float sums[8];
    T values[8] = {};
    const bool aligned = reinterpret_cast<std::uintptr_t>(target) % 16 == 0;
    if (is_inside && aligned)
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(target);
    else if (is_inside)
      for (int i = 0; i < 8; ++i) values[i] = target[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = to_float(values[i]);
    for (int first = 0; first < k; first += kAtOnce) {
      int lane_id = -1;
      float lane_factor = 0.0F;
      if (lane < kAtOnce && first + lane < k) {
        lane_id = __ldcg(expert_ids + token * k + first + lane);
        lane_factor = __ldcg(weights + token * k + first + lane);
      }
      if (waits) {
        wait_for_previous_kernel();
        allow_next_kernel();
        waits = false;
      }
      uint4 rows[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (is_inside && first + j < k)
          rows[j] = __ldcs(reinterpret_cast<const uint4*>(out + (token * k + first + j) * hidden + column));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int id = __shfl_sync(~0U, lane_id, j);
        const float factor = __shfl_sync(~0U, lane_factor, j);
        if (id < 0 || id >= num_experts) continue;
        const T* row = reinterpret_cast<const T*>(&rows[j]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] += factor * to_float(row[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = from_float<T>(sums[i]);
    if (is_inside && aligned)
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4*>(values);
    else if (is_inside)
      for (int i = 0; i < 8; ++i) target[i] = values[i];
  }
}

template <class T>
void launch(ops::Stream stream, const MoeGroupedArgs& args) {
  const std::int64_t num_tokens = args.x.shape[0], k = args.expert_ids.shape[1], num_pairs = num_tokens * k;
  const std::int64_t num_experts = args.gate_up.shape[0], hidden = args.x.shape[1], intermediate = args.down.shape[2];
  const Scratch scratch = lay_out(args.scratch.data, num_pairs, num_experts, hidden, intermediate);
  const auto* ids = static_cast<const std::int32_t*>(args.expert_ids.data);
  const DependentLaunch sort{.grid = dim3(static_cast<unsigned>(num_sort_blocks(num_pairs))),
                             .block = dim3(kSortThreads),
                             .stream = native(stream)};
  // Where experts have few pairs each, two blocks would share what one can do.
  const int blocks_a_tile = num_pairs > num_experts * kMoeBlockPairs / 2 ? 2 : 1;
  const auto place = [&](auto kernel) {
    sort(kernel, ids, static_cast<int>(num_pairs), static_cast<int>(num_experts), blocks_a_tile * kMoeBlockPairs,
         scratch);
  };
  if (num_sort_blocks(num_pairs) == 1) {
    place(moe_place_kernel<true>);
  } else {
    sort(moe_count_kernel, ids, static_cast<int>(num_pairs), static_cast<int>(num_experts), scratch);
    place(moe_place_kernel<false>);
  }

  const TensorView pairs = make_view(scratch.hidden, args.x.dtype, {num_pairs, intermediate}, args.x.device);
  const auto product = [&](bool up, const TensorView& x, const TensorView& weight, void* y) {
    moe_product(stream, {.up = up,
                         .blocks_a_tile = blocks_a_tile,
                         .k = static_cast<int>(k),
                         .x = x,
                         .weight = weight,
                         .tiles = scratch.tiles,
                         .num_tiles = scratch.num_tiles,
                         .sorted_pairs = scratch.sorted_pairs,
                         .y = y});
  };
  product(true, args.x, args.gate_up, scratch.hidden);
  product(false, pairs, args.down, scratch.out);
  const DependentLaunch sum{
      .grid = dim3(static_cast<unsigned>(num_tokens)), .block = dim3(kSumThreads), .stream = native(stream)};
  sum(moe_sum_kernel<T>, static_cast<const T*>(scratch.out), ids, static_cast<const float*>(args.weights.data),
      static_cast<int>(num_experts), static_cast<int>(k), static_cast<int>(hidden), static_cast<T*>(args.y.data),
      args.y.stride[0]);
}

}  // namespace

bool can_group_moe(const MoeGroupedArgs& args) {
  const DType dtype = args.x.dtype;
  return is_hopper(args.x.device.index) && (dtype == DType::bf16 || dtype == DType::f16) &&
         args.x.shape[1] % kColumns == 0 && args.down.shape[2] % kColumns == 0 &&
         args.gate_up.shape[0] <= kMaxSortedExperts && args.x.stride[0] % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.x.data) % 16 == 0 &&
         args.x.shape[0] * args.expert_ids.shape[1] < (std::int64_t{1} << 30);
}

std::size_t moe_grouped_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t num_experts,
                                      std::int64_t hidden, std::int64_t intermediate) {
  return lay_out(nullptr, num_tokens * num_experts_per_token, num_experts, hidden, intermediate).num_bytes;
}

void moe_grouped(ops::Stream stream, const MoeGroupedArgs& args) {
  DELTAIC_CHECK(can_group_moe(args), "moe_grouped: ", args.x.shape[0], " tokens of ", args.x.shape[1],
                ", intermediate ", args.down.shape[2], ", ", args.gate_up.shape[0], " experts, ", name(args.x.dtype));
  visit_half(args.x.dtype, [&]<class T>(T) { launch<T>(stream, args); });
}

}  // namespace deltaic::cuda

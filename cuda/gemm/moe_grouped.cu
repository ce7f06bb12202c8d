// Mixture of experts for many tokens, as grouped matrix products on tensor cores (wgmma, sm_90a).
//   sort: blocks count the (token, j) pairs of each expert, then place them, an expert after the other, and cut each
//   expert into tiles of 128 pairs; nothing comes back to the host. Where a pair lies does not change what it gives
//   up, then down: persistent blocks of two warpgroups take tiles of 128 pairs by 256 rows of weights; a warpgroup has
//   64 pairs. Rows of x are gathered. Up takes 128 rows of the gate and the same 128 of the up matrix, so that a thread
//   holds both and stores silu(gate) * up. Copies run three steps of 64 columns ahead, across tiles
//   sum: a block a token adds its experts in order
//   bound by memory up to about 2k tokens of 256 experts (the experts' weights), then by tensor cores
#include "cuda/gemm/moe_grouped.h"

#include <algorithm>

#include "cpp/src/check.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kSortThreads = 1024, kPairsPerBlock = 4096;
constexpr int kMaxSortedExperts = kSortThreads;
constexpr int kTilePairs = 128, kTileRows = 256, kTileColumns = 64;
constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kPairBytes = kTilePairs * kTileColumns * 2, kRowBytes = kTileRows * kTileColumns * 2;
constexpr int kStageBytes = kPairBytes + kRowBytes;

// Pairs [begin, begin + count) of the sorted order belong to one expert.
struct PairTile {
  int expert, begin, count, padding;
};

// Parts of the scratch memory.
struct Scratch {
  std::int32_t* num_tiles;
  std::int32_t* counts;  // [blocks of kPairsPerBlock pairs, num_experts]
  PairTile* tiles;
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
  scratch.tiles = static_cast<PairTile*>(
      take((num_pairs / kTilePairs + num_experts) * static_cast<std::int64_t>(sizeof(PairTile))));
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

// Places this block's pairs, and in block 0 lists the tiles. Every block adds up all counts anew.
__global__ void __launch_bounds__(kSortThreads)
    moe_place_kernel(const std::int32_t* expert_ids, int num_pairs, int num_experts, Scratch scratch) {
  __shared__ int next[kSortThreads];  // where the next pair of an expert goes
  wait_for_previous_kernel();
  allow_next_kernel();
  const int thread = threadIdx.x;
  int all = 0, before = 0;
  if (thread < num_experts) {
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
  const int num_tiles = (all + kTilePairs - 1) / kTilePairs;
  const int tile_end = inclusive_block_sum<kSortThreads>(num_tiles);
  for (int i = 0; i < num_tiles; ++i)
    scratch.tiles[tile_end - num_tiles + i] = {.expert = thread,
                                               .begin = begin + i * kTilePairs,
                                               .count = min(kTilePairs, all - i * kTilePairs),
                                               .padding = 0};
  if (thread == kSortThreads - 1) *scratch.num_tiles = tile_end;
}

template <class T>
struct Params {
  const T* x;  // up: rows of tokens; down: rows in sorted order
  std::int64_t x_stride;
  const T* weight;  // [num_experts, num_rows, num_columns]
  int num_rows, num_columns, k;
  Scratch scratch;
  T* y;  // up: rows in sorted order; down: rows of pairs
};

// One tile of a block's work: which pairs, and the first row of weights (up: of outputs).
struct Tile {
  PairTile pairs;
  int first;
};

template <class T, bool kUp>
class Work {
 public:
  static constexpr int kOutputs = kUp ? kTileRows / 2 : kTileRows;

  __device__ explicit Work(const Params<T>& p)
      : p_(p),
        num_outputs_(kUp ? p.num_rows / 2 : p.num_rows),
        tiles_across_((num_outputs_ + kOutputs - 1) / kOutputs),
        num_tiles_(__ldcg(p.scratch.num_tiles) * tiles_across_) {}
  __device__ int num_tiles() const { return num_tiles_; }
  __device__ int num_outputs() const { return num_outputs_; }
  __device__ Tile tile(int index) const {
    const int4 bits = __ldcg(reinterpret_cast<const int4*>(p_.scratch.tiles + index / tiles_across_));
    return {{bits.x, bits.y, bits.z, bits.w}, index % tiles_across_ * kOutputs};
  }

 private:
  const Params<T>& p_;
  int num_outputs_, tiles_across_, num_tiles_;
};

// Copies the steps of a block's tiles into the stages, one after the other. Thread t copies 16-byte vector t % 8 of
// rows t / 8, t / 8 + 32, ... of both operands. What lies past the pairs or the rows is not copied: it reaches only
// sums that nobody stores.
template <class T, bool kUp>
class Loader {
 public:
  __device__ Loader(const Params<T>& p, const Work<T, kUp>& work, char* stages)
      : p_(p), work_(work), tile_(blockIdx.x), num_steps_(p.num_columns / kTileColumns) {
    const int row = threadIdx.x / 8, vector = threadIdx.x % 8;
    shared_ = shared_address(stages) + row * 128 + (vector ^ row % 8) * 16;
    if (tile_ >= work_.num_tiles()) return;
    look_up_tile(tile_);
    look_up_pairs(tile_);
    begin_tile();
  }

  __device__ void load(int stage) {
    if (tile_ < work_.num_tiles()) {
      const std::uint32_t shared = shared_ + stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < kTilePairs / 32; ++i)
        if (pairs_[i] != nullptr) async_copy_16(shared + i * 32 * 128, pairs_[i] + step_ * kTileColumns);
#pragma unroll
      for (int i = 0; i < kTileRows / 32; ++i) {
        // Up: the upper half of the tile is the gate, the lower the up matrix.
        const int row = i * 32 % Work<T, kUp>::kOutputs;
        const std::int64_t part = kUp && i * 32 >= kTileRows / 2 ? work_.num_outputs() : 0;
        if (row < num_rows_)
          async_copy_16(shared + kPairBytes + i * 32 * 128,
                        rows_ + (part + row) * p_.num_columns + step_ * kTileColumns);
      }
      ++step_;
      if (step_ == 1) look_up_pairs(tile_ + static_cast<int>(gridDim.x));
      if (step_ == num_steps_) {
        step_ = 0;
        tile_ += gridDim.x;
        if (tile_ < work_.num_tiles()) begin_tile();
      }
    }
    async_copy_commit();
  }

 private:
  // The rows of a tile's pairs are known a tile ahead: what is looked up for them is asked for while copies of the tile
  // before are under way.
  __device__ void look_up_tile(int tile) {
    if (tile < work_.num_tiles()) next_ = work_.tile(tile);
  }
  __device__ void look_up_pairs(int tile) {
    if (tile >= work_.num_tiles()) return;
    const int row = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < kTilePairs / 32; ++i) {
      next_source_[i] = row + i * 32 < next_.pairs.count ? next_.pairs.begin + row + i * 32 : -1;
      if constexpr (kUp)
        if (next_source_[i] >= 0) next_source_[i] = __ldcg(p_.scratch.sorted_pairs + next_source_[i]);
    }
  }

  __device__ void begin_tile() {
    const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < kTilePairs / 32; ++i) {
      const int source = next_source_[i];
      pairs_[i] = source < 0 ? nullptr : p_.x + std::int64_t{kUp ? source / p_.k : source} * p_.x_stride + column;
    }
    rows_ = p_.weight +
            (static_cast<std::int64_t>(next_.pairs.expert) * p_.num_rows + next_.first + row) * p_.num_columns + column;
    num_rows_ = work_.num_outputs() - next_.first - row;
    look_up_tile(tile_ + static_cast<int>(gridDim.x));
  }

  const Params<T>& p_;
  const Work<T, kUp>& work_;
  int tile_, num_steps_, step_ = 0, num_rows_ = 0;
  std::uint32_t shared_;
  const T* pairs_[kTilePairs / 32];
  const T* rows_ = nullptr;
  Tile next_;
  int next_source_[kTilePairs / 32];
};

template <class T>
__device__ void store_pair(T* address, float first, float second) {
  T values[2] = {from_float<T>(first), from_float<T>(second)};
  *reinterpret_cast<unsigned*>(address) = *reinterpret_cast<unsigned*>(values);
}

template <class T, bool kUp>
__global__ void __launch_bounds__(kThreads, 1) moe_grouped_kernel(const __grid_constant__ Params<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // can_group_moe
  extern __shared__ char shared_bytes[];
  // Swizzled tiles begin at multiples of 1024 bytes.
  char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Work<T, kUp> work(p);
  Loader<T, kUp> loader(p, work, stages);
  for (int i = 0; i < kStages - 1; ++i) loader.load(i);

  // The compiler must see that a warpgroup branches as one.
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  const int num_steps = p.num_columns / kTileColumns;
  int stage = 0;
  const auto next_step = [&] {
    async_copy_wait<kStages - 2>();
    fence_async_shared();
    __syncthreads();  // this step's copies are there, and the products of the step before have ended
  };
  for (int index = blockIdx.x; index < work.num_tiles(); index += gridDim.x) {
    const Tile tile = work.tile(index);
    if (warpgroup * 64 >= __shfl_sync(~0U, tile.pairs.count, 0)) {
      for (int step = 0; step < num_steps; ++step, stage = (stage + 1) % kStages) {
        next_step();
        loader.load((stage + kStages - 1) % kStages);
      }
      continue;
    }
    std::int64_t target[2];  // rows of y; those past the pairs are not stored
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4 + half * 8;
      target[half] = row < tile.pairs.count ? tile.pairs.begin + row : -1;
      if constexpr (!kUp)
        if (target[half] >= 0) target[half] = __ldcg(p.scratch.sorted_pairs + target[half]);
    }
    float sums[128];
#pragma unroll
    for (float& sum : sums) sum = 0.0F;
    for (int step = 0; step < num_steps; ++step, stage = (stage + 1) % kStages) {
      next_step();
      const char* base = stages + stage * kStageBytes;
      const std::uint64_t a = rows_descriptor(shared_address(base + warpgroup * 64 * 128)),
                          b = rows_descriptor(shared_address(base + kPairBytes));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileColumns / 16; ++i) wgmma_rows<T, 256>(sums, a + i * 2, b + i * 2, 1);
      wgmma_commit();
      loader.load((stage + kStages - 1) % kStages);
      wgmma_wait<0>();
    }
    hold_registers(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (target[half] < 0) continue;
      T* y = p.y + target[half] * work.num_outputs() + tile.first + thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < Work<T, kUp>::kOutputs / 8; ++j) {
        if (tile.first + j * 8 >= work.num_outputs()) continue;
        float first = sums[j * 4 + half * 2], second = sums[j * 4 + half * 2 + 1];
        if constexpr (kUp) {
          first = first / (1.0F + __expf(-first)) * sums[64 + j * 4 + half * 2];
          second = second / (1.0F + __expf(-second)) * sums[64 + j * 4 + half * 2 + 1];
        }
        store_pair(y + j * 8, first, second);
      }
    }
  }
#endif
}

constexpr int kSumThreads = 256;

template <class T>
__global__ void __launch_bounds__(kSumThreads)
    moe_sum_kernel(const T* out, const std::int32_t* expert_ids, const float* weights, int num_experts, int k,
                   int hidden, T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  for (int column = threadIdx.x * 8; column < hidden; column += kSumThreads * 8) {
    T* target = y + token * y_stride + column;
    float sums[8];
    T values[8];
    const auto read = [&](const T* source) {
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(source);
    };
    const bool aligned = reinterpret_cast<std::uintptr_t>(target) % 16 == 0;
    if (aligned)
      read(target);
    else
      for (int i = 0; i < 8; ++i) values[i] = target[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = to_float(values[i]);
#pragma unroll 8
    for (int j = 0; j < k; ++j) {
      const int id = expert_ids[token * k + j];
      if (id < 0 || id >= num_experts) continue;
      const float weight = weights[token * k + j];
      read(out + (token * k + j) * hidden + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += weight * to_float(values[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = from_float<T>(sums[i]);
    if (aligned)
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4*>(values);
    else
      for (int i = 0; i < 8; ++i) target[i] = values[i];
  }
}

template <class T>
void launch(ops::Stream stream, const MoeGroupedArgs& args) {
  const std::int64_t num_tokens = args.x.shape[0], k = args.expert_ids.shape[1], num_pairs = num_tokens * k;
  const std::int64_t num_experts = args.gate_up.shape[0], hidden = args.x.shape[1], intermediate = args.down.shape[2];
  const int device_index = args.x.device.index;
  const Scratch scratch = lay_out(args.scratch.data, num_pairs, num_experts, hidden, intermediate);
  const auto* ids = static_cast<const std::int32_t*>(args.expert_ids.data);
  const DependentLaunch sort{.grid = dim3(static_cast<unsigned>(num_sort_blocks(num_pairs))),
                             .block = dim3(kSortThreads),
                             .stream = native(stream)};
  for (const auto kernel : {moe_count_kernel, moe_place_kernel})
    sort(kernel, ids, static_cast<int>(num_pairs), static_cast<int>(num_experts), scratch);

  const DependentLaunch multiply{.grid = dim3(static_cast<unsigned>(num_multiprocessors(device_index))),
                                 .block = dim3(kThreads),
                                 .stream = native(stream),
                                 .shared_bytes = kStages * kStageBytes + 1024};
  const auto run = [&](auto kernel, const Params<T>& params) {
    allow_all_shared_memory(reinterpret_cast<const void*>(kernel), device_index);
    multiply(kernel, params);
  };
  run(moe_grouped_kernel<T, true>, Params<T>{.x = static_cast<const T*>(args.x.data),
                                             .x_stride = args.x.stride[0],
                                             .weight = static_cast<const T*>(args.gate_up.data),
                                             .num_rows = static_cast<int>(2 * intermediate),
                                             .num_columns = static_cast<int>(hidden),
                                             .k = static_cast<int>(k),
                                             .scratch = scratch,
                                             .y = static_cast<T*>(scratch.hidden)});
  run(moe_grouped_kernel<T, false>, Params<T>{.x = static_cast<const T*>(scratch.hidden),
                                              .x_stride = intermediate,
                                              .weight = static_cast<const T*>(args.down.data),
                                              .num_rows = static_cast<int>(hidden),
                                              .num_columns = static_cast<int>(intermediate),
                                              .k = static_cast<int>(k),
                                              .scratch = scratch,
                                              .y = static_cast<T*>(scratch.out)});
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
         args.x.shape[1] % kTileColumns == 0 && args.down.shape[2] % kTileColumns == 0 &&
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

// Mixture of experts for 1 to 16 tokens: the weights of each expert that a token chose are read once.
//   every block finds the distinct experts anew from the ids (at most 256 pairs, in the order of their first pair)
//   up: the tiles of all distinct experts form one line that the blocks share out evenly; a tile is 4 rows of the gate
//   and the same 4 of the up matrix. All tokens are multiplied with every tile: that is free, and what nobody asked for
//   is not stored
//   down: a block owns rows of y and goes through all experts for them, so that it can sum them in order
//   bound by memory: distinct experts x 3 x hidden x intermediate x 2 bytes; tile_stream.cuh says how they are read
#include "cuda/gemm/moe_streaming.h"

#include <algorithm>
#include <type_traits>

#include "cpp/src/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/gemm/tile_stream.cuh"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 8, kUpSplit = 4, kDownSplit = 2;
constexpr int kMaxPairs = 256;  // one a thread

template <class T>
struct Params {
  const T* x;
  std::int64_t x_stride;
  const float* norm_weight;
  float eps;
  const T *gate_up, *down, *shared_gate_up, *shared_down;
  const std::int32_t* expert_ids;
  const float* weights;
  const float* shared_logits;
  std::int64_t shared_logits_stride;
  int num_tokens, k, num_experts, hidden, intermediate;
  T* scratch;  // [num_tokens, num_slots, intermediate]
  T* y;
  std::int64_t y_stride;

  // Slots of a token: its k experts, then the shared one.
  __device__ __host__ int num_slots() const { return k + (shared_gate_up != nullptr ? 1 : 0); }
};

// The distinct experts of all tokens, and the slot at which a token has an expert (-1: it has it not).
struct Experts {
  int count;  // the shared one included
  int id[kMaxPairs + 1];
  alignas(16) signed char slot[kMaxPairs + 1][16];
  int pair_id[kMaxPairs];
  int warp_count[kWarps];
};

template <class T>
__device__ void find_experts(const Params<T>& p, Experts& experts) {
  const int thread = threadIdx.x, num_pairs = p.num_tokens * p.k;
  const int has_shared = p.shared_gate_up != nullptr ? 1 : 0;
  int id = -1;
  if (thread < num_pairs) {
    id = __ldcg(p.expert_ids + thread);
    if (id >= p.num_experts) id = -1;
    experts.pair_id[thread] = id;
  }
  for (int i = thread; i <= num_pairs; i += kWarps * 32)
    *reinterpret_cast<uint4*>(experts.slot[i]) = {~0U, ~0U, ~0U, ~0U};
  __syncthreads();
  int first = thread;
  if (id >= 0 && p.num_tokens > 1)
    for (int i = thread - 1; i >= 0; --i)
      if (experts.pair_id[i] == id) first = i;
  const unsigned is_first = __ballot_sync(~0U, id >= 0 && first == thread);
  if (thread % 32 == 0) experts.warp_count[thread / 32] = __popc(is_first);
  __syncthreads();
  // The place of the expert whose first pair is `pair`: only known to that pair's thread, so it goes through pair_id.
  int count = 0, place = __popc(is_first & ((1U << thread % 32) - 1));
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < thread / 32) place += experts.warp_count[i];
    count += experts.warp_count[i];
  }
  if (id >= 0 && first == thread) experts.id[place] = id, experts.pair_id[thread] = place;
  __syncthreads();
  if (id >= 0) experts.slot[experts.pair_id[first]][thread / p.k] = static_cast<signed char>(thread % p.k);
  if (has_shared != 0 && thread < 16) experts.slot[count][thread] = static_cast<signed char>(p.k);
  if (thread == 0) experts.count = count + has_shared, experts.id[count] = -1;
  __syncthreads();
}

template <class T, bool kManyTokens, int kRing>
__global__ void __launch_bounds__(kWarps * 32, 1) moe_up_kernel(Params<T> p) {
  using Tiles = TileStream<T, kWarps, kUpSplit, kManyTokens, kRing>;
  constexpr int kTileOutputs = kStreamTileRows / 2;
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tiles::Shared*>(shared_bytes);
  T* x = reinterpret_cast<T*>(shared_bytes + sizeof(shared));
  __shared__ Experts experts;
  const int x_row = p.hidden + kTokenPadding, group = threadIdx.x % 32 / 4;

  stage_tokens<T, kWarps>(p.x, p.x_stride, p.num_tokens, p.hidden, p.norm_weight,
                          NormFactors::first(p.norm_weight, p.hidden), p.eps, x, x_row);
  wait_for_previous_kernel();
  allow_next_kernel();
  find_experts(p, experts);

  const int tiles_per_expert = p.intermediate / kTileOutputs;
  const std::int64_t num_tiles = static_cast<std::int64_t>(experts.count) * tiles_per_expert;
  const int begin = static_cast<int>(num_tiles * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(num_tiles * (blockIdx.x + 1) / gridDim.x);
  const std::int64_t expert_size = 2LL * p.intermediate * p.hidden;
  const auto rows = [&](int tile) {
    const int expert = (begin + tile) / tiles_per_expert, output = (begin + tile) % tiles_per_expert * kTileOutputs;
    const int row = output + group % kTileOutputs + (group >= kTileOutputs ? p.intermediate : 0);
    const int id = experts.id[expert];
    const T* matrix = id < 0 ? p.shared_gate_up : p.gate_up + id * expert_size;
    return matrix + static_cast<std::int64_t>(row) * p.hidden;
  };
  Tiles tiles(shared, p.hidden, end - begin, rows);
  const TokenFragment<T> fragment = token_fragment(x, x_row, p.num_tokens);
  tiles.run(
      rows, [&](int) { return fragment; },
      [&](int first, int count) {
        for (int i = threadIdx.x; i < count * kTileOutputs * p.num_tokens; i += kWarps * 32) {
          const int row = i % kTileOutputs, token = i / kTileOutputs % p.num_tokens,
                    tile = i / (kTileOutputs * p.num_tokens);
          const int expert = (begin + first + tile) / tiles_per_expert;
          const int slot = experts.slot[expert][token];
          if (slot < 0) continue;
          const float gate = tiles.sum(tile, token, row);
          const float up = tiles.sum(tile, token, row + kTileOutputs);
          const int output = (begin + first + tile) % tiles_per_expert * kTileOutputs + row;
          p.scratch[static_cast<std::int64_t>(token * p.num_slots() + slot) * p.intermediate + output] =
              from_float<T>(gate / (1.0F + __expf(-gate)) * up);
        }
      });
}

// Units of 8 rows of y that a block has at most.
__device__ __host__ inline int units_per_block(int hidden, int num_blocks) {
  return (hidden / kStreamTileRows + num_blocks - 1) / num_blocks;
}

template <class T, bool kManyTokens, int kRing>
__global__ void __launch_bounds__(kWarps * 32, 1) moe_down_kernel(Params<T> p) {
  using Tiles = TileStream<T, kWarps, kDownSplit, kManyTokens, kRing>;
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tiles::Shared*>(shared_bytes);
  const int num_slots = p.num_slots(), num_rows = p.num_tokens * num_slots, x_row = p.intermediate + kTokenPadding;
  T* x = reinterpret_cast<T*>(shared_bytes + sizeof(shared));    // [num_tokens * num_slots, x_row]
  float* dots = reinterpret_cast<float*>(x + num_rows * x_row);  // [units, num_tokens * num_slots, 8]
  __shared__ Experts experts;
  __shared__ float factors[kMaxPairs + 16];
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;

  // Written before the up kernel, which has waited for it.
  find_experts(p, experts);
  const int num_units = p.hidden / kStreamTileRows;
  const int begin = static_cast<int>(static_cast<std::int64_t>(num_units) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<std::int64_t>(num_units) * (blockIdx.x + 1) / gridDim.x);
  const int num_experts = experts.count;
  const auto rows = [&](int tile) {
    const int row = (begin + tile / num_experts) * kStreamTileRows + group, id = experts.id[tile % num_experts];
    const T* matrix = id < 0 ? p.shared_down : p.down + static_cast<std::int64_t>(id) * p.hidden * p.intermediate;
    return matrix + static_cast<std::int64_t>(row) * p.intermediate;
  };
  Tiles tiles(shared, p.intermediate, (end - begin) * num_experts, rows);
  for (int i = threadIdx.x; i < num_rows; i += kWarps * 32) {
    const int token = i / num_slots, slot = i % num_slots;
    if (slot == p.k) {
      factors[i] = 1.0F / (1.0F + __expf(-__ldcg(p.shared_logits + token * p.shared_logits_stride)));
    } else {  // an id out of range adds nothing
      const int id = __ldcg(p.expert_ids + token * p.k + slot);
      factors[i] = 0 <= id && id < p.num_experts ? __ldcg(p.weights + token * p.k + slot) : -INFINITY;
    }
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  const int num_sums = (end - begin) * kStreamTileRows * p.num_tokens;
  const auto y_of = [&](int i) {  // of row i % rows of the block, token i / rows
    return p.y + i / ((end - begin) * kStreamTileRows) * p.y_stride + begin * kStreamTileRows +
           i % ((end - begin) * kStreamTileRows);
  };
  T first_y{};
  if (static_cast<int>(threadIdx.x) < num_sums) first_y = __ldcg(y_of(threadIdx.x));
  const int vectors = p.intermediate / 8;
  for (int i = threadIdx.x; i < num_rows * vectors; i += kWarps * 32)
    *reinterpret_cast<uint4*>(x + i / vectors * x_row + i % vectors * 8) =
        __ldcg(reinterpret_cast<const uint4*>(p.scratch) + i);
  __syncthreads();

  const auto row_of = [&](int tile, int token) {
    const int slot = token < p.num_tokens ? experts.slot[tile % num_experts][token] : 0;
    return x + (slot < 0 || token >= p.num_tokens ? 0 : token * num_slots + slot) * x_row + quad * 8;
  };
  const auto tokens = [&](int tile) -> TokenFragment<T> {
    return {row_of(tile, group), kManyTokens ? row_of(tile, group + 8) : nullptr};
  };
  tiles.run(rows, tokens, [&](int first, int count) {
    for (int i = threadIdx.x; i < count * kStreamTileRows * p.num_tokens; i += kWarps * 32) {
      const int row = i % kStreamTileRows, token = i / kStreamTileRows % p.num_tokens;
      const int tile = i / (kStreamTileRows * p.num_tokens);
      const int slot = experts.slot[(first + tile) % num_experts][token];
      if (slot < 0) continue;
      dots[((first + tile) / num_experts * num_rows + token * num_slots + slot) * kStreamTileRows + row] =
          tiles.sum(tile, token, row);
    }
  });
  for (int i = threadIdx.x; i < num_sums; i += kWarps * 32) {
    const int row = i % ((end - begin) * kStreamTileRows), token = i / ((end - begin) * kStreamTileRows);
    T* y = y_of(i);
    float sum = to_float(i == static_cast<int>(threadIdx.x) ? first_y : __ldcg(y));
    for (int slot = 0; slot < num_slots; ++slot) {
      const float factor = factors[token * num_slots + slot];
      const int at = (row / kStreamTileRows * num_rows + token * num_slots + slot) * kStreamTileRows;
      if (factor != -INFINITY) sum += factor * dots[at + row % kStreamTileRows];
    }
    *y = from_float<T>(sum);
  }
}

constexpr std::size_t kStaticBytes = sizeof(Experts) + sizeof(float) * (kMaxPairs + 16) + 1024;

// Shared memory of the kernels, static memory included.
template <bool kManyTokens, int kRing>
std::size_t up_bytes(std::int64_t num_tokens, std::int64_t hidden) {
  return sizeof(typename TileStream<__half, kWarps, kUpSplit, kManyTokens, kRing>::Shared) + kStaticBytes +
         sizeof(__half) * static_cast<std::size_t>(num_tokens * (hidden + kTokenPadding));
}
template <bool kManyTokens, int kRing>
std::size_t down_bytes(std::int64_t num_tokens, std::int64_t num_slots, std::int64_t hidden, std::int64_t intermediate,
                       int num_blocks) {
  const std::int64_t num_rows = num_tokens * num_slots;
  const std::int64_t num_dots = units_per_block(static_cast<int>(hidden), num_blocks) * num_rows * kStreamTileRows;
  return sizeof(typename TileStream<__half, kWarps, kDownSplit, kManyTokens, kRing>::Shared) + kStaticBytes +
         sizeof(__half) * static_cast<std::size_t>(num_rows * (intermediate + kTokenPadding)) +
         sizeof(float) * static_cast<std::size_t>(num_dots);
}

template <class T, bool kManyTokens>
void launch(ops::Stream stream, const Params<T>& params, int device_index) {
  const int num_blocks = num_multiprocessors(device_index);
  const std::size_t most_bytes = max_shared_bytes(device_index);
  const auto run = [&](auto kernel, std::size_t kernel_bytes, int blocks) {
    allow_all_shared_memory(reinterpret_cast<const void*>(kernel), device_index);
    const DependentLaunch dependent{
        .grid = dim3(static_cast<unsigned>(blocks)),
        .block = dim3(kWarps * 32),
        .stream = native(stream),
        .shared_bytes = std::max(kernel_bytes, std::min(kOneBlockBytes, most_bytes)) - kStaticBytes};
    dependent(kernel, params);
  };
  const auto up = [&]<int kRing>(std::integral_constant<int, kRing>) {
    run(moe_up_kernel<T, kManyTokens, kRing>, up_bytes<kManyTokens, kRing>(params.num_tokens, params.hidden),
        num_blocks);
  };
  const auto down = [&]<int kRing>(std::integral_constant<int, kRing>) {
    run(moe_down_kernel<T, kManyTokens, kRing>,
        down_bytes<kManyTokens, kRing>(params.num_tokens, params.num_slots(), params.hidden, params.intermediate,
                                       num_blocks),
        std::min(num_blocks, params.hidden / kStreamTileRows));
  };
  using Long = std::integral_constant<int, kLongRing>;
  using Short = std::integral_constant<int, kShortRing>;
  up_bytes<kManyTokens, kLongRing>(params.num_tokens, params.hidden) <= most_bytes ? up(Long{}) : up(Short{});
  down_bytes<kManyTokens, kLongRing>(params.num_tokens, params.num_slots(), params.hidden, params.intermediate,
                                     num_blocks) <= most_bytes
      ? down(Long{})
      : down(Short{});
}

}  // namespace

bool can_stream_moe(const MoeStreamingArgs& args) {
  const std::int64_t num_tokens = args.x.shape[0], k = args.expert_ids.shape[1];
  const std::int64_t hidden = args.x.shape[1], intermediate = args.down.shape[2];
  const DType dtype = args.x.dtype;
  if (dtype != DType::bf16 && dtype != DType::f16) return false;
  if (num_tokens > kMaxMoeStreamingTokens || num_tokens * k > kMaxPairs) return false;
  if (hidden % kLineColumns != 0 || intermediate % kLineColumns != 0) return false;
  if (args.x.stride[0] % 8 != 0 || reinterpret_cast<std::uintptr_t>(args.x.data) % 16 != 0) return false;
  if (args.shared_gate_up.data != nullptr && args.shared_gate_up.shape[0] != 2 * intermediate) return false;
  const std::int64_t num_slots = k + (args.shared_gate_up.data != nullptr ? 1 : 0);
  const int num_blocks = num_multiprocessors(args.x.device.index);
  const std::size_t most_bytes = max_shared_bytes(args.x.device.index);
  return num_tokens <= 8
             ? std::max(up_bytes<false, kShortRing>(num_tokens, hidden),
                        down_bytes<false, kShortRing>(num_tokens, num_slots, hidden, intermediate, num_blocks)) <=
                   most_bytes
             : std::max(up_bytes<true, kShortRing>(num_tokens, hidden),
                        down_bytes<true, kShortRing>(num_tokens, num_slots, hidden, intermediate, num_blocks)) <=
                   most_bytes;
}

std::size_t moe_streaming_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t intermediate) {
  return static_cast<std::size_t>(num_tokens * (num_experts_per_token + 1) * intermediate) * 2;
}

void moe_streaming(ops::Stream stream, const MoeStreamingArgs& args) {
  DELTAIC_CHECK(can_stream_moe(args), "moe_streaming: ", args.x.shape[0], " tokens with ", args.expert_ids.shape[1],
                " experts each, hidden ", args.x.shape[1], ", intermediate ", args.down.shape[2], ", ",
                name(args.x.dtype));
  visit_half(args.x.dtype, [&]<class T>(T) {
    const Params<T> params{
        .x = static_cast<const T*>(args.x.data),
        .x_stride = args.x.stride[0],
        .norm_weight = static_cast<const float*>(args.norm_weight.data),
        .eps = args.eps,
        .gate_up = static_cast<const T*>(args.gate_up.data),
        .down = static_cast<const T*>(args.down.data),
        .shared_gate_up = static_cast<const T*>(args.shared_gate_up.data),
        .shared_down = static_cast<const T*>(args.shared_down.data),
        .expert_ids = static_cast<const std::int32_t*>(args.expert_ids.data),
        .weights = static_cast<const float*>(args.weights.data),
        .shared_logits = static_cast<const float*>(args.shared_logits.data),
        .shared_logits_stride = args.shared_logits.data == nullptr ? 0 : args.shared_logits.stride[0],
        .num_tokens = static_cast<int>(args.x.shape[0]),
        .k = static_cast<int>(args.expert_ids.shape[1]),
        .num_experts = static_cast<int>(args.gate_up.shape[0]),
        .hidden = static_cast<int>(args.x.shape[1]),
        .intermediate = static_cast<int>(args.down.shape[2]),
        .scratch = static_cast<T*>(args.scratch.data),
        .y = static_cast<T*>(args.y.data),
        .y_stride = args.y.stride[0]};
    const int device_index = args.x.device.index;
    params.num_tokens <= 8 ? launch<T, false>(stream, params, device_index)
                           : launch<T, true>(stream, params, device_index);
  });
}

}  // namespace deltaic::cuda

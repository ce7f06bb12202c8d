// Grouped matrix products of a mixture of experts on tensor cores (wgmma, sm_90a).
//   persistent clusters of one or two blocks take tiles of an expert's pairs by 256 rows of weights (up: 128 of the
//   gate and the same 128 of the up matrix, so that a thread holds both and stores silu(gate) * up). Blocks of a
//   cluster share the weights, each copies half of them for both, and have half of the pairs each
//   weights are the left factor: two warpgroups of 128 rows by as many pairs as there are, in steps of 16 or 32, so
//   that few products are of nothing
//   a warpgroup copies, kStages steps of 64 columns ahead, across tiles: rows of x are gathered, weights are boxes
//   bound by the experts' weights up to about 2k tokens of 256 experts, then by tensor cores
#include "cuda/gemm/moe_product.h"

#include <cooperative_groups.h>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/tensor_copy.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kTileRows = 256, kBoxRows = kTileRows / 2, kTileColumns = 64;
constexpr int kStages = 4;
constexpr int kConsumers = 256, kProducers = 128, kThreads = kConsumers + kProducers;
constexpr int kRowBytes = kTileColumns * 2, kBoxBytes = kBoxRows * kRowBytes, kWeightBytes = kTileRows * kRowBytes;
constexpr int kStageBytes = kWeightBytes + kMoeBlockPairs * kRowBytes;
constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // stages begin at a multiple of 1024

template <class T>
struct Params {
  const T* x;
  std::int64_t x_stride;
  int num_rows, num_columns, k;
  const MoePairTile* tiles;
  const std::int32_t *num_tiles, *sorted_pairs;
  T* y;
};

struct Barriers {
  std::uint64_t full[kStages];   // the pairs and the weights of a step are there
  std::uint64_t empty[kStages];  // all warps of all blocks of the cluster have read a stage
};

// Where a walk over the stages is.
struct Ring {
  int stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// What a block does of a tile: its pairs, and the first row of weights (up: of outputs).
struct Tile {
  int expert, begin, count, first;
  int half;  // of the tile's pairs, rounded up: what the fullest block has
};

template <class T, bool kUp, int kBlocks>
struct Work {
  static constexpr int kOutputs = kUp ? kTileRows / 2 : kTileRows;
  const Params<T>& p;
  int num_outputs, tiles_across, num_tiles;

  __device__ explicit Work(const Params<T>& params)
      : p(params),
        num_outputs(kUp ? p.num_rows / 2 : p.num_rows),
        tiles_across((num_outputs + kOutputs - 1) / kOutputs),
        num_tiles(__ldcg(p.num_tiles) * tiles_across) {}
  __device__ int4 bits(int index) const {
    return index < num_tiles ? __ldcg(reinterpret_cast<const int4*>(p.tiles + index / tiles_across)) : int4{};
  }
  __device__ Tile tile(int index, const int4& bits) const {
    const int half = (bits.z + kBlocks - 1) / kBlocks, rank = static_cast<int>(blockIdx.x) % kBlocks;
    return {bits.x, bits.y + rank * half, max(0, min(half, bits.z - rank * half)), index % tiles_across * kOutputs,
            half};
  }
  // Calls f(index) for the tiles of this cluster.
  template <class F>
  __device__ void each(const F& f) const {
    for (int index = static_cast<int>(blockIdx.x) / kBlocks; index < num_tiles;
         index += static_cast<int>(gridDim.x) / kBlocks)
      f(index);
  }
  __device__ int next(int index) const { return index + static_cast<int>(gridDim.x) / kBlocks; }
};

// The copies of all steps. Thread t copies 16-byte vector t % 8 of pairs t / 8, t / 8 + 16, ...; what lies past the
// pairs is not copied: it reaches only sums that nobody stores.
template <class T, bool kUp, int kBlocks>
__device__ void copy_steps(const Params<T>& p, const CUtensorMap& map, const Work<T, kUp, kBlocks>& work, char* stages,
                           Barriers& barriers) {
  constexpr int kPairsAtOnce = kProducers / 8, kCopies = kMoeBlockPairs / kPairsAtOnce;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, row = thread / 8, vector = thread % 8;
  const std::uint32_t shared = shared_address(stages) + kWeightBytes + swizzled_offset(row, vector);
  const int num_steps = p.num_columns / kTileColumns, rank = static_cast<int>(blockIdx.x) % kBlocks;
  const std::uint64_t policy = evict_first_policy();
  Ring ring;
  work.each([&](int index) {
    const Tile tile = work.tile(index, work.bits(index));
    int sources[kCopies];  // rows of x
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      sources[i] = row + i * kPairsAtOnce < tile.count ? tile.begin + row + i * kPairsAtOnce : -1;
      if constexpr (kUp)
        if (sources[i] >= 0) sources[i] = __ldcg(p.sorted_pairs + sources[i]) / p.k;
    }
    const auto copy_box = [&](int box, int column) {
      char* to = stages + ring.stage * kStageBytes + box * kBoxBytes;
      const int y = tile.first + box * (kUp ? work.num_outputs : kBoxRows);
      if constexpr (kBlocks == 1)
        tensor_load(to, &map, column, y, tile.expert, &barriers.full[ring.stage], policy);
      else
        tensor_load_multicast(to, &map, column, y, tile.expert, &barriers.full[ring.stage], (1 << kBlocks) - 1, policy);
    };
    for (int step = 0; step < num_steps; ++step, ring.advance()) {
      barrier_wait(&barriers.empty[ring.stage], ring.phase ^ 1);
      if (thread == 0) {
        barrier_expect(&barriers.full[ring.stage], kWeightBytes);
        for (int box = rank; box < 2; box += kBlocks) copy_box(box, step * kTileColumns);
      }
      const std::uint32_t to = shared + ring.stage * kStageBytes;
      const T* x = p.x + step * kTileColumns + vector * 8;
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        if (sources[i] >= 0) async_copy_16(to + i * kPairsAtOnce * kRowBytes, x + sources[i] * p.x_stride);
      async_copy_arrive(shared_address(&barriers.full[ring.stage]));
    }
  });
}

// A tile with up to kPairs pairs a block, by the consumers.
template <class T, bool kUp, int kBlocks, int kPairs>
__device__ __forceinline__ void multiply_tile(const Params<T>& p, const Work<T, kUp, kBlocks>& work, const Tile& tile,
                                              const char* stages, Barriers& barriers, Ring& ring) {
  // The compiler must see that a warpgroup branches as one.
  const int warpgroup = __shfl_sync(~0U, threadIdx.x / 128, 0), warp = static_cast<int>(threadIdx.x) % 128 / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, num_steps = p.num_columns / kTileColumns;
  int targets[kPairs / 8];  // rows of y; those past the pairs are not stored
#pragma unroll
  for (int j = 0; j < kPairs / 8; ++j) {
    const int pair = j * 8 + lane / 4;
    targets[j] = pair < tile.count ? tile.begin + pair : -1;
    if constexpr (!kUp)
      if (targets[j] >= 0) targets[j] = __ldcg(p.sorted_pairs + targets[j]);
  }
  // Of the 256 rows a warpgroup has two times 64. Up: of the gate and of the up matrix; down: of 128, every other
  // eight, so that a warp has 32 rows in a row.
  constexpr int kGroupRows = kUp ? 64 : 128, kNextRows = kUp ? 128 : 8, kEightRows = kUp ? 1024 : 2048;
  const auto release = [&](int stage) {
    if (lane == 0)
#pragma unroll
      for (int rank = 0; rank < kBlocks; ++rank) {
        if constexpr (kBlocks == 1)
          barrier_arrive(&barriers.empty[stage]);
        else
          barrier_arrive_at(&barriers.empty[stage], rank);
      }
  };
  float sums[2][kPairs / 2];
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) sums[0][i] = sums[1][i] = 0.0F;
  int before = 0;
  for (int step = 0; step < num_steps; ++step, ring.advance()) {
    barrier_wait(&barriers.full[ring.stage], ring.phase);
    fence_async_shared();  // the pairs were written by ordinary copies
    const std::uint32_t base = shared_address(stages) + ring.stage * kStageBytes;
    const std::uint64_t a = rows_descriptor(base + warpgroup * kGroupRows * kRowBytes, kEightRows);
    const std::uint64_t b = rows_descriptor(base + kWeightBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        wgmma_rows<T, kPairs>(sums[part], a + part * (kNextRows * kRowBytes >> 4) + i * 2, b + i * 2, 1);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(before);
    before = ring.stage;
  }
  wgmma_wait<0>();
  hold_registers(sums[0]);
  hold_registers(sums[1]);
  release(before);

  // A thread's four sums of eight pairs become words of two rows of outputs, four lanes' words 16 bytes of outputs. Up:
  // 16 rows of 16 pairs at once, down: 32 rows of 8 pairs.
  const int quad = lane % 4, row = tile.first + warpgroup * kGroupRows + warp * (kUp ? 16 : 32);
  const auto store = [&](int target, int row_in_warp, const std::uint32_t (&words)[4]) {
    const uint4 piece = transposed_in_quad(words);
    if (target >= 0 && row + row_in_warp < work.num_outputs)
      *reinterpret_cast<uint4*>(p.y + std::int64_t{target} * work.num_outputs + row + row_in_warp) = piece;
  };
  if constexpr (kUp) {
#pragma unroll
    for (int j = 0; j < kPairs / 8; j += 2) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float gate = sums[0][j * 4 + i * 2 + c];
          values[c] = __fdividef(gate, 1.0F + __expf(-gate)) * sums[1][j * 4 + i * 2 + c];
        }
        words[i] = transposed(pack<T>(values[0], values[1]));
      }
      store(quad < 2 ? targets[j] : targets[j + 1], quad % 2 * 8, words);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPairs / 8; ++j) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = transposed(pack<T>(sums[i % 2][j * 4 + i / 2 * 2], sums[i % 2][j * 4 + i / 2 * 2 + 1]));
      store(targets[j], quad * 8, words);
    }
  }
}

template <class T, bool kUp, int kBlocks>
__device__ void multiply_tiles(const Params<T>& p, const Work<T, kUp, kBlocks>& work, const char* stages,
                               Barriers& barriers) {
  Ring ring;
  int4 bits = work.bits(static_cast<int>(blockIdx.x) / kBlocks);
  work.each([&](int index) {
    const Tile tile = work.tile(index, bits);
    bits = work.bits(work.next(index));  // long before it is used
    const auto multiply = [&]<int kPairs>() {
      multiply_tile<T, kUp, kBlocks, kPairs>(p, work, tile, stages, barriers, ring);
    };
    const int half = __shfl_sync(~0U, tile.half, 0);
    if (half <= 16)
      multiply.template operator()<16>();
    else if (half <= 32)
      multiply.template operator()<32>();
    else if (half <= 64)
      multiply.template operator()<64>();
    else if (half <= 96)
      multiply.template operator()<96>();
    else if (half <= 112)
      multiply.template operator()<112>();
    else if (half <= 128)
      multiply.template operator()<128>();
    else if (half <= 144)
      multiply.template operator()<144>();
    else
      multiply.template operator()<160>();
  });
}

template <class T, bool kUp, int kBlocks>
__global__ void __launch_bounds__(kThreads, 1)
    moe_product_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Params<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared_bytes[];
  __shared__ Barriers barriers;
  char* stages = shared_bytes + (-shared_address(shared_bytes) & 1023);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers.full[i], kProducers + 1);
      barrier_init(&barriers.empty[i], kConsumers / 32 * kBlocks);
    }
    fence_barrier_init();
  }
  const auto sync = [] {
    if constexpr (kBlocks == 1)
      __syncthreads();
    else
      cg::this_cluster().sync();
  };
  sync();
  wait_for_previous_kernel();
  allow_next_kernel();
  const Work<T, kUp, kBlocks> work(p);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_steps<T, kUp, kBlocks>(p, map, work, stages, barriers);
    __syncwarp();
    sync();  // no block leaves while another copies into it or arrives at its barriers
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles<T, kUp, kBlocks>(p, work, stages, barriers);
    __syncwarp();
    sync();
  }
#else
  __trap();  // not built for this chip
#endif
}

template <class T, bool kUp, int kBlocks>
void launch(ops::Stream stream, const MoeProductArgs& args) {
  const TensorView& weight = args.weight;
  const std::int64_t num_rows = weight.shape[1], num_columns = weight.shape[2];
  const std::int64_t sizes[] = {num_columns, num_rows, weight.shape[0]};
  const std::int64_t strides[] = {num_columns, num_rows * num_columns};
  const int box[] = {kTileColumns, kBoxRows, 1};
  const CUtensorMap map = make_tensor_map("moe_grouped", weight.dtype, weight.data, sizes, strides, box);
  const int device_index = args.x.device.index;
  const auto kernel = moe_product_kernel<T, kUp, kBlocks>;
  allow_all_shared_memory(reinterpret_cast<const void*>(kernel), device_index);
  const DependentLaunch launch{
      .grid = dim3(static_cast<unsigned>(num_multiprocessors(device_index) / kBlocks * kBlocks)),
      .block = dim3(kThreads),
      .stream = native(stream),
      .shared_bytes = kSharedBytes,
      .cluster = kBlocks};
  launch(kernel, map,
         Params<T>{.x = static_cast<const T*>(args.x.data),
                   .x_stride = args.x.stride[0],
                   .num_rows = static_cast<int>(num_rows),
                   .num_columns = static_cast<int>(num_columns),
                   .k = args.k,
                   .tiles = args.tiles,
                   .num_tiles = args.num_tiles,
                   .sorted_pairs = args.sorted_pairs,
                   .y = static_cast<T*>(args.y)});
}

}  // namespace

void moe_product(ops::Stream stream, const MoeProductArgs& args) {
  visit_half(args.x.dtype, [&]<class T>(T) {
    if (args.up)
      args.blocks_a_tile == 1 ? launch<T, true, 1>(stream, args) : launch<T, true, 2>(stream, args);
    else
      args.blocks_a_tile == 1 ? launch<T, false, 1>(stream, args) : launch<T, false, 2>(stream, args);
  });
}

}  // namespace deltaic::cuda

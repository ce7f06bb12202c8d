// Paged attention for many query tokens a request, causal, with any context before them.
//   One block is a key/value head of a request and 128 of its query rows (row r is token r / group, head r % group, so
//   that a group shares keys and values); blocks with the most keys come first. One warp copies boxes of keys and
//   values into two stages; two warpgroups of 64 rows compute S = Q K^T and O += P V with wgmma, S of the next tile of
//   keys running beside the softmax of this one. Tiles of keys begin at key 0 for every row, in order.
//   bound by the tensor cores: 4 * head_dim operations a visible key and row
//   source: Shah et al., FlashAttention-3, 2024
#include <cmath>

#include "cuda/attention/attention_params.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/tensor_copy.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupRows = 64, kRows = 2 * kGroupRows;
constexpr int kConsumers = 2 * kGroupThreads, kThreads = kConsumers + kGroupThreads;
constexpr int kStages = 2;
constexpr int kQueryChunkBytes = kRows * kBoxDims * 2;
constexpr float kLog2E = 1.4426950408889634F;

template <int kDim>
struct Layout {
  static constexpr int kKeys = kDim == 256 ? 80 : 128;  // of a tile; what fits
  static constexpr int kChunks = kDim / kBoxDims;
  static constexpr int kChunkBytes = kKeys * kBoxDims * 2;
  static constexpr int kTileBytes = kChunks * kChunkBytes;
  static constexpr int kKey = kChunks * kQueryChunkBytes;  // behind the queries
  static constexpr int kValue = kKey + kStages * kTileBytes;
  static constexpr int kBarriers = kValue + kStages * kTileBytes;
  static constexpr int kBytes = kBarriers + 4 * kStages * 8;
};

struct Barriers {
  std::uint64_t *key_full, *value_full, *key_empty, *value_empty;  // [kStages]

  template <int kDim>
  __device__ static Barriers in(char* shared) {
    auto* first = reinterpret_cast<std::uint64_t*>(shared + Layout<kDim>::kBarriers);
    return {first, first + kStages, first + 2 * kStages, first + 3 * kStages};
  }
};

// The work of a block.
struct Tile {
  int request, kv_head, first_row, num_rows;  // num_rows of the request, from row 0
  int query_begin, group, seq_len, first_position;

  __device__ int position(int row) const { return first_position + min(row, num_rows - 1) / group; }
  __device__ int num_keys() const { return position(first_row + kRows - 1) + 1; }  // seen by any row
};

__device__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int kThreadsInBarrier>
__device__ void sync_named(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreadsInBarrier) : "memory");
}

// One warp; a lane a box of keys and one of values.
template <int kDim>
__device__ void copy_tiles(const KvMaps& maps, const AttentionParams& p, const Tile& tile, char* shared) {
  using L = Layout<kDim>;
  constexpr int kBoxes = L::kKeys / kBoxKeys * L::kChunks;
  static_assert(kBoxes <= 32);
  const Barriers barriers = Barriers::in<kDim>(shared);
  const std::int32_t* blocks = p.block_table + tile.request * p.table_stride;
  const int lane = threadIdx.x % 32, chunk = lane % L::kChunks, first = lane / L::kChunks * kBoxKeys;
  const int num_keys = tile.num_keys(), box = chunk * L::kChunkBytes + first * kBoxDims * 2;
  for (int begin = 0, i = 0; begin < num_keys; begin += L::kKeys, ++i) {
    const int stage = i % kStages, round = i / kStages, key = begin + first;
    const bool has_box = lane < kBoxes && key < tile.seq_len;
    const unsigned num_boxes = __popc(__ballot_sync(~0U, has_box));
    const int block = has_box ? blocks[key / p.block_size] : 0;
    const auto copy = [&](const CUtensorMap& map, std::uint64_t* full, std::uint64_t* empty, int to) {
      if (round > 0) barrier_wait(&empty[stage], (round - 1) & 1);
      if (lane == 0) barrier_expect(&full[stage], num_boxes * kBoxBytes);
      __syncwarp();
      if (has_box)
        tensor_load(shared + to + stage * L::kTileBytes + box, &map, chunk * kBoxDims, tile.kv_head, key % p.block_size,
                    block, &full[stage]);
    };
    copy(maps.k, barriers.key_full, barriers.key_empty, L::kKey);
    copy(maps.v, barriers.value_full, barriers.value_empty, L::kValue);
  }
}

// The warpgroup's rows of Q, 0 where the request has no more, swizzled as wgmma reads them.
template <class T, int kDim>
__device__ void load_queries(const AttentionParams& p, const Tile& tile, int group_row, char* query) {
  constexpr int kUnits = kDim / 8, kRowsAtOnce = kGroupThreads / kUnits, kLoads = 8;  // loads in flight
  const int unit = threadIdx.x % kUnits;
#pragma unroll
  for (int first = threadIdx.x % kGroupThreads / kUnits; first < kGroupRows; first += kRowsAtOnce * kLoads) {
    uint4 value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = group_row + first + i * kRowsAtOnce, request_row = tile.first_row + row;
      value[i] = uint4{};
      if (first + i * kRowsAtOnce >= kGroupRows || request_row >= tile.num_rows) continue;
      const std::int64_t token = tile.query_begin + request_row / p.group;
      const std::int64_t head = tile.kv_head * p.group + request_row % p.group;
      const T* q = static_cast<const T*>(p.q.data) + token * p.q.token_stride + head * p.q.head_stride;
      value[i] = __ldg(reinterpret_cast<const uint4*>(q + unit * 8));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = group_row + first + i * kRowsAtOnce;
      if (first + i * kRowsAtOnce < kGroupRows)
        *reinterpret_cast<uint4*>(query + unit / 8 * kQueryChunkBytes + swizzled_offset(row, unit % 8)) = value[i];
    }
  }
  fence_async_shared();
}

template <class T, int kDim>
struct RowSums {
  static constexpr int kKeys = Layout<kDim>::kKeys;
  float out[kDim / 2], scores[kKeys / 2];
  std::uint32_t weights[kKeys / 16][4];
  float max[2], sum[2], kept[2];  // of rows g and g + 8

  __device__ void issue_scores(std::uint64_t query, std::uint64_t keys) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma_rows<T, kKeys>(scores, query + k / 4 * (kQueryChunkBytes >> 4) + k % 4 * 2,
                           keys + k / 4 * (Layout<kDim>::kChunkBytes >> 4) + k % 4 * 2, k > 0);
    wgmma_commit();
  }

  __device__ void issue_values(std::uint64_t values) {
#pragma unroll
    for (int t = 0; t < kKeys / 16; ++t) wgmma_columns<T, kDim>(out, weights[t], values + t * (kBoxKeys * 128 >> 4), 1);
    wgmma_commit();
  }

  // scores become weights, in f32; kept is what the sums so far are to be multiplied by. last[h] is the last key of the
  // tile that a row sees.
  __device__ void softmax(float scale_log2, bool masked, const int (&last)[2]) {
    const int q = threadIdx.x % 4;
    if (masked) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        if (i / 4 * 8 + 2 * q + i % 2 > last[i / 2 % 2]) scores[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = max[h];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
        largest = fmaxf(largest, fmaxf(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, 2));
      kept[h] = exp2_approximate((max[h] - largest) * scale_log2);
      max[h] = largest;
      const float base = largest * scale_log2;
      float added = 0.0F;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * i + 2 * h + c];
          score = exp2_approximate(fmaf(score, scale_log2, -base));
          added += score;
        }
      sum[h] = sum[h] * kept[h] + added;
    }
  }

  __device__ void round_weights() {
#pragma unroll
    for (int t = 0; t < kKeys / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[t][i] = pack<T>(scores[8 * t + 2 * i], scores[8 * t + 2 * i + 1]);
  }

  __device__ void rescale() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i] *= kept[i / 2 % 2];
  }

  // Lane q of the four that share a row reads and writes channels 8 q ... 8 q + 7 of each 32, all gates at once.
  __device__ void store(const AttentionParams& p, const Tile& tile, int thread_row) {
    constexpr int kGroups = kDim / 32;
    const int q = threadIdx.x % 4;
    const bool has_gate = p.gate.data != nullptr;
    uint4 gates[2][kGroups];
    T* to[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.first_row + thread_row + 8 * h, last_row = min(row, tile.num_rows - 1);
      const std::int64_t token = tile.query_begin + last_row / p.group;
      const std::int64_t head = tile.kv_head * p.group + last_row % p.group;
      to[h] = static_cast<T*>(p.out.data) + token * p.out.token_stride + head * p.out.head_stride + 8 * q;
      const T* gate = static_cast<const T*>(p.gate.data) + token * p.gate.token_stride + head * p.gate.head_stride;
#pragma unroll
      for (int j = 0; j < kGroups; ++j)
        if (has_gate) gates[h][j] = __ldg(reinterpret_cast<const uint4*>(gate + 32 * j + 8 * q));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
      total += __shfl_xor_sync(~0U, total, 1);
      total += __shfl_xor_sync(~0U, total, 2);
      const float inverse = 1.0F / total;
      const bool is_there = tile.first_row + thread_row + 8 * h < tile.num_rows;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        uint4 gate{};
        if (has_gate) gate = transposed_in_quad({gates[h][j].x, gates[h][j].y, gates[h][j].z, gates[h][j].w});
        const std::uint32_t gate_words[4] = {gate.x, gate.y, gate.z, gate.w};
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low = out[16 * j + 4 * i + 2 * h] * inverse, high = out[16 * j + 4 * i + 2 * h + 1] * inverse;
          if (has_gate) {
            const float2 g = unpack<T>(gate_words[i]);
            low = __fdividef(low, 1.0F + __expf(-g.x)), high = __fdividef(high, 1.0F + __expf(-g.y));
          }
          words[i] = pack<T>(low, high);
        }
        const uint4 piece = transposed_in_quad(words);
        if (is_there) *reinterpret_cast<uint4*>(to[h] + 32 * j) = piece;
      }
    }
  }
};

// What a tile holds past the last key may be NaN, and 0 * NaN is not 0. All consumers.
template <int kDim>
__device__ void clear_values(char* values, int first_row) {
  using L = Layout<kDim>;
  const int units = (L::kKeys - first_row) * 8;
  for (int i = threadIdx.x; i < L::kChunks * units; i += kConsumers)
    reinterpret_cast<uint4*>(values + i / units * L::kChunkBytes + first_row * 128)[i % units] = uint4{};
  fence_async_shared();
  sync_named<kConsumers>(3);
}

template <class T, int kDim>
__device__ void compute_tiles(const AttentionParams& p, const Tile& tile, char* shared) {
  using L = Layout<kDim>;
  const Barriers barriers = Barriers::in<kDim>(shared);
  const int group_row = threadIdx.x / kGroupThreads * kGroupRows;
  const int warp_row = group_row + threadIdx.x % kGroupThreads / 32 * 16, lane = threadIdx.x % 32;
  const float scale_log2 = p.scale * kLog2E;
  const int num_tiles = (tile.num_keys() + L::kKeys - 1) / L::kKeys;

  load_queries<T, kDim>(p, tile, group_row, shared);
  sync_named<kGroupThreads>(1 + threadIdx.x / kGroupThreads);
  const std::uint64_t query = rows_descriptor(shared_address(shared) + group_row * 128);
  const auto keys = [&](int stage) {
    return rows_descriptor(shared_address(shared) + L::kKey + stage * L::kTileBytes);
  };
  const auto values = [&](int stage) {
    return columns_descriptor(shared_address(shared) + L::kValue + stage * L::kTileBytes, L::kChunkBytes);
  };
  const auto release = [&](std::uint64_t* empty) {
    if (lane == 0) barrier_arrive(empty);
  };

  RowSums<T, kDim> sums;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) sums.out[i] = 0.0F;
  sums.max[0] = sums.max[1] = -INFINITY, sums.sum[0] = sums.sum[1] = 0.0F;
  const int first_position = tile.position(tile.first_row + warp_row);
  int last[2] = {tile.position(tile.first_row + warp_row + lane / 4),
                 tile.position(tile.first_row + warp_row + lane / 4 + 8)};

  barrier_wait(&barriers.key_full[0], 0);
  wgmma_fence();
  sums.issue_scores(query, keys(0));
  wgmma_wait<0>();
  hold_registers(sums.scores);
  release(&barriers.key_empty[0]);
  sums.softmax(scale_log2, L::kKeys - 1 > first_position, last);
  sums.round_weights();
  for (int i = 1; i < num_tiles; ++i) {
    const int stage = i % kStages, before = (i - 1) % kStages;
    barrier_wait(&barriers.key_full[stage], i / kStages & 1);
    wgmma_fence();
    sums.issue_scores(query, keys(stage));
    barrier_wait(&barriers.value_full[before], (i - 1) / kStages & 1);
    sums.issue_values(values(before));
    wgmma_wait<1>();
    hold_registers(sums.scores);
    release(&barriers.key_empty[stage]);
    last[0] -= L::kKeys, last[1] -= L::kKeys;
    sums.softmax(scale_log2, (i + 1) * L::kKeys - 1 > first_position, last);
    wgmma_wait<0>();
    hold_registers(sums.out);
    release(&barriers.value_empty[before]);
    sums.rescale();
    sums.round_weights();
  }
  const int stage = (num_tiles - 1) % kStages, num_keys = tile.seq_len - (num_tiles - 1) * L::kKeys;
  barrier_wait(&barriers.value_full[stage], (num_tiles - 1) / kStages & 1);
  if (num_keys < L::kKeys) clear_values<kDim>(shared + L::kValue + stage * L::kTileBytes, num_keys);
  wgmma_fence();
  sums.issue_values(values(stage));
  wgmma_wait<0>();
  hold_registers(sums.out);
  sums.store(p, tile, warp_row + lane / 4);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_attention_kernel(const __grid_constant__ KvMaps maps, const __grid_constant__ AttentionParams p,
                             int max_tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  Tile tile;
  tile.request = blockIdx.y;
  tile.kv_head = static_cast<int>(blockIdx.x) % p.num_kv_heads;
  tile.first_row = (max_tiles - 1 - static_cast<int>(blockIdx.x) / p.num_kv_heads) * kRows;
  tile.query_begin = p.query_start_loc[tile.request];
  const int query_len = p.query_start_loc[tile.request + 1] - tile.query_begin;
  tile.num_rows = query_len * p.group;
  if (tile.first_row >= tile.num_rows) return;
  tile.group = p.group;
  tile.seq_len = p.seq_lens[tile.request];
  tile.first_position = tile.seq_len - query_len;
  if (tile.num_keys() <= 0) return;  // metadata are wrong: nobody would copy the keys that consumers wait for

  const Barriers barriers = Barriers::in<kDim>(shared);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&barriers.key_full[stage], 1);
      barrier_init(&barriers.value_full[stage], 1);
      barrier_init(&barriers.key_empty[stage], kConsumers / 32);
      barrier_init(&barriers.value_empty[stage], kConsumers / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < kConsumers + 32) copy_tiles<kDim>(maps, p, tile, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    compute_tiles<T, kDim>(p, tile, shared);
  }
#else
  __trap();  // not built for this chip
#endif
}

template <class T, int kDim>
void launch_prefill(cudaStream_t stream, const AttentionParams& params, const KvMaps& maps) {
  const auto kernel = prefill_attention_kernel<T, kDim>;
  constexpr int kBytes = Layout<kDim>::kBytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const auto max_tiles = static_cast<int>((std::int64_t{params.max_query_len} * params.group + kRows - 1) / kRows);
  const DependentLaunch launch{
      .grid = dim3(static_cast<unsigned>(max_tiles * params.num_kv_heads), static_cast<unsigned>(params.num_reqs)),
      .block = dim3(kThreads),
      .stream = stream,
      .shared_bytes = kBytes};
  launch(kernel, maps, params, max_tiles);
}

}  // namespace

void attention_prefill(cudaStream_t stream, const AttentionParams& params, DType dtype, const KvMaps& maps) {
  visit_half(dtype, [&]<class T>(T) {
    switch (params.head_dim) {
      case 64:
        return launch_prefill<T, 64>(stream, params, maps);
      case 128:
        return launch_prefill<T, 128>(stream, params, maps);
      default:
        return launch_prefill<T, 256>(stream, params, maps);
    }
  });
}

}  // namespace deltaic::cuda

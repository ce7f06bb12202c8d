// What the parts of the sampler share: a row of logits is worked on by a cluster of blocks, each with a chunk of it.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/ops/sampler_slot.cuh"

namespace deltaic::cuda::sampler_detail {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxCluster = 16;
constexpr int kBins = 1024;      // of a histogram
constexpr int kCapacity = 1024;  // tokens that are sorted by one block
constexpr int kMaxGroups = 256;  // parts of a row whose largest token is known
static_assert(kBins == 2 * kThreads && kCapacity == 2 * kThreads);

// Tokens in their order: the larger key has the larger logit, or the lower id where logits are equal (-0 is 0).
using Key = unsigned long long;
constexpr Key kNotFinite = ~Key{0};  // of a row with a NaN or +inf

__device__ inline std::uint32_t ordered(float logit) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ inline Key key_of(float logit, int id) {
  return Key{ordered(logit)} << 32 | (~0U - static_cast<std::uint32_t>(id));
}
__device__ inline float logit_of(Key key) {
  const auto order = static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float((order & 0x80000000U) != 0 ? order & 0x7FFFFFFFU : ~order);
}
__device__ inline int id_of(Key key) { return static_cast<int>(~0U - static_cast<std::uint32_t>(key)); }

__device__ inline float infinity() { return __uint_as_float(0x7F800000U); }

// The blocks of one row: a cluster where the hardware has them, else the block alone.
struct Cluster {
  int rank = 0, size = 1;

  __device__ Cluster() {
#if __CUDA_ARCH__ >= 900
    rank = static_cast<int>(cooperative_groups::this_cluster().block_rank());
    size = static_cast<int>(cooperative_groups::this_cluster().num_blocks());
#endif
  }
  // A barrier of all threads; what they wrote before, everyone sees behind it.
  __device__ void sync() const {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#else
    __syncthreads();
#endif
  }
  // Where `shared` lies in another block.
  template <class T>
  __device__ T* at(T* shared, int block) const {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().map_shared_rank(shared, block);
#else
    return shared;
#endif
  }
};

// A token that may win a draw.
struct Draw {
  float score;  // (logit - largest) / temperature + noise, to f32 accuracy
  float logit;
  std::uint32_t bits;  // noise is the gumbel() of these
  std::int32_t id;     // -1: none
};

// Weights are sums of probabilities up to a common factor, the largest 1, in fixed point: exact in any order.
using Weight = unsigned long long;
constexpr double kWeightUnit = 0x1p42;

// Tokens of a bin, and of those before it.
struct Boundary {
  std::int32_t bin;  // -1: no bin
  std::uint32_t count, count_before;
  Weight weight_before;
};
struct Sums {
  std::uint32_t count;
  Weight weight;
};

struct Shared {
  // A histogram of the chunk, then of the row.
  std::uint32_t count[kBins], residual[kBins];
  std::uint32_t total_count[kBins];
  Weight total_weight[kBins];
  Key keys[kCapacity];  // tokens that are sorted
  std::uint32_t num_keys;

  Key group_keys[2][4 * kWarps];  // the largest of a part of the chunk; in turn: another block may still read the last
  Key row_keys[kMaxGroups];       // those of the row
  Key kth_key;
  SamplerSlot slot;
  unsigned long long warp_total[kWarps], block_total;
  Draw warp_draws[kWarps];
  Draw block_draw;
  Sums warp_sums[kWarps];
  Sums scanned[kThreads];
  Boundary boundary;
  Key cut;
  Weight kept_weight;
  std::uint32_t num_kept;
  std::int32_t drawn_id, token_id;
  std::uint32_t num_above;
};

// A row and the part of it that is this block's: ids [begin, end), begin a multiple of 4.
struct Chunk {
  float* row;
  int begin, end;
  int largest;      // tokens of the largest chunk of the row
  bool is_aligned;  // groups of 4 can be loaded at once

  __device__ Chunk(float* row_, int vocab_size, const Cluster& cluster) : row(row_) {
    const int num_groups = (vocab_size + 3) / 4;
    const int per_block = (num_groups + cluster.size - 1) / cluster.size;
    largest = per_block * 4;
    begin = min(cluster.rank * largest, vocab_size);
    end = min(begin + largest, vocab_size);
    is_aligned = reinterpret_cast<std::uintptr_t>(row_) % 16 == 0;
  }
  __device__ bool has(int id) const { return id >= begin && id < end; }

  __device__ float4 load(const float* from, bool aligned, int id) const {
    if (aligned && id + 4 <= end) return *reinterpret_cast<const float4*>(from + id);
    const float none = -infinity();
    return {id < end ? from[id] : none, id + 1 < end ? from[id + 1] : none, id + 2 < end ? from[id + 2] : none,
            id + 3 < end ? from[id + 3] : none};
  }
  __device__ void store(float* to, bool aligned, int id, float4 v) const {
    if (aligned && id + 4 <= end) {
      *reinterpret_cast<float4*>(to + id) = v;
      return;
    }
    if (id < end) to[id] = v.x;
    if (id + 1 < end) to[id + 1] = v.y;
    if (id + 2 < end) to[id + 2] = v.z;
    if (id + 3 < end) to[id + 3] = v.w;
  }

  // visit(first id, 4 logits) for every group of the chunk, -inf past its end. All threads of the block make the same
  // number of calls, so that visit may hold warp collectives.
  template <int kUnroll, class Visit>
  __device__ void for_each_group(Visit visit) const {
    const int num_groups = (end - begin + 3) / 4;
    for (int first = 0; first < num_groups; first += kThreads * kUnroll) {
      float4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = load(row, is_aligned, begin + 4 * (first + u * kThreads + thread()));
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (first + u * kThreads < num_groups) visit(begin + 4 * (first + u * kThreads + thread()), v[u]);
    }
  }
  // visit(id, logit) for every token of the chunk, as above; has(id) is false past its end.
  template <int kUnroll, class Visit>
  __device__ void for_each(Visit visit) const {
    for_each_group<kUnroll>([&](int id, float4 v) {
      visit(id, v.x);
      visit(id + 1, v.y);
      visit(id + 2, v.z);
      visit(id + 3, v.w);
    });
  }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
};

__device__ inline Key max_of(Key a, Key b) { return a > b ? a : b; }
__device__ inline Key warp_max(Key key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) key = max_of(key, __shfl_xor_sync(~0U, key, offset));
  return key;
}

// Parts of a chunk, each the threads of a part of a warp: at most kMaxGroups in a row.
__device__ inline int groups_per_block(const Cluster& cluster) {
  return kWarps * (cluster.size <= 4 ? 4 : cluster.size <= 8 ? 2 : 1);
}

// The largest key of the cluster, in every thread; row_keys are the largest of its parts. `turn` alternates between the
// calls of a kernel.
__device__ inline Key cluster_max(Shared& s, const Cluster& cluster, Key key, int turn) {
  const int per_block = groups_per_block(cluster), lanes = kThreads / per_block;
  for (int offset = lanes / 2; offset > 0; offset /= 2) key = max_of(key, __shfl_xor_sync(~0U, key, offset));
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % lanes == 0) s.group_keys[turn][thread / lanes] = key;
  cluster.sync();
  const int num_groups = per_block * cluster.size;
  if (thread < kMaxGroups)
    s.row_keys[thread] =
        thread < num_groups ? *cluster.at(&s.group_keys[turn][thread % per_block], thread / per_block) : Key{0};
  __syncthreads();
  key = s.row_keys[thread % 32];
#pragma unroll
  for (int i = 32; i < kMaxGroups; i += 32) key = max_of(key, s.row_keys[i + thread % 32]);
  return warp_max(key);
}

// The k-th largest of row_keys, in every thread of the block; k in [1, kMaxGroups].
__device__ inline Key kth_of_groups(Shared& s, int k) {
  static_assert(kThreads == 2 * kMaxGroups);
  const auto thread = static_cast<int>(threadIdx.x);
  const int mine = thread / 2, first = thread % 2 * (kMaxGroups / 2);
  const Key key = s.row_keys[mine];
  int before = 0;
  for (int i = first; i < first + kMaxGroups / 2; ++i) {
    const Key other = s.row_keys[i];
    before += other > key || (other == key && i < mine) ? 1 : 0;
  }
  before += __shfl_xor_sync(~0U, before, 1);
  if (before == k - 1) s.kth_key = key;
  __syncthreads();
  const Key kth = s.kth_key;
  __syncthreads();
  return kth;
}

// Sums over threads 0 ... threadIdx.x.
__device__ inline Sums block_scan(Shared& s, Sums value) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const Sums other{__shfl_up_sync(~0U, value.count, step), __shfl_up_sync(~0U, value.weight, step)};
    if (lane >= step) value.count += other.count, value.weight += other.weight;
  }
  __syncthreads();  // the sums of the last call are read
  if (lane == 31) s.warp_sums[warp] = value;
  __syncthreads();
  for (unsigned i = 0; i < warp; ++i) value.count += s.warp_sums[i].count, value.weight += s.warp_sums[i].weight;
  return value;
}

}  // namespace deltaic::cuda::sampler_detail

// The delta rule from chunk to chunk (docs/models.md, "Gated delta rule in chunks"), after prepare_gdn_chunks, where
// there is no wgmma.
//   a cluster a (sequence, value head); each of its blocks has kGdnRows rows of the state, 16 a warp, and all share the
//   tiles of a chunk, which one block loads for all
//   two warps keep the state in registers, as the accumulator of one product and the left factor of the next, and go on
//   to the next chunk; two more take it from them and compute the output; one loads
//   bound by the latency of a chunk, 128 mma a warp, times the chunks of the longest sequence
#include <cooperative_groups.h>

#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/ops/gdn_math.cuh"
#include "cuda/ops/gdn_walk.cuh"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;

using bf16 = __nv_bfloat16;
constexpr int kBlocks = kGdnDim / kGdnRows;  // of a cluster
constexpr int kPairs = kGdnRows / 16;        // a warp for the state, one for the output
constexpr int kConsumers = 2 * kPairs;       // warps
constexpr int kThreads = (kConsumers + 1) * 32;
constexpr int kStages = 3;
constexpr int kSteps = kGdnDim / 16;  // of a product over the key dim

struct Stage {
  alignas(128) GdnKeyTiles keys;
  alignas(128) bf16 w[kGdnChunk * kGdnDim];
  bf16 p[kGdnChunk * kGdnChunk];
  float from_start[kGdnChunk], to_end[kGdnChunk];
  alignas(128) bf16 u[kGdnChunk * kGdnRows];
};
constexpr int kSharedValueBytes = offsetof(GdnValueTiles, u);  // w, p and the decays
static_assert(offsetof(Stage, u) - offsetof(Stage, w) == kSharedValueBytes);

struct Shared {
  Stage stages[kStages];
  uint4 state[kPairs][2][kSteps][32];  // operands that a state warp hands to its output warp
  uint4 values[kPairs][2][kGdnChunk / 16][32];
  std::uint64_t full[kStages], empty[kStages];  // empty: by the warps of this block
  std::uint64_t cluster_empty[kStages];         // by those of all blocks; of the first block
};

// Where the state warp and the output warp of a pair meet: named barriers, one a buffer. The one who has written or
// read announces it, the other meets it.
enum Meeting { kStateFull, kValuesFull, kHandedOver };
__device__ inline int barrier_of(Meeting what, int pair, int buffer) {
  return 1 + (what * kPairs + pair) * 2 + buffer;  // 0 is the block's
}
__device__ inline void meet(Meeting what, int pair, int buffer) {
  asm volatile("bar.sync %0, 64;" ::"r"(barrier_of(what, pair, buffer)) : "memory");
}
__device__ inline void announce(Meeting what, int pair, int buffer) {
  asm volatile("bar.arrive %0, 64;" ::"r"(barrier_of(what, pair, buffer)) : "memory");
}

// The left operand of mma from an accumulator of 16 rows: columns 16 i ... are accumulators 2 i and 2 i + 1.
__device__ inline uint4 operand(const float (&low)[4], const float (&high)[4]) {
  return {pack<bf16>(low[0], low[1]), pack<bf16>(low[2], low[3]), pack<bf16>(high[0], high[1]),
          pack<bf16>(high[2], high[3])};
}
__device__ inline void mma(float (&c)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  mma_m16n8k16<bf16>(c, a.x, a.y, a.z, a.w, b0, b1);
}

// Runs use(i, operand i) for i < kCount, with the operands of kAhead later ones already asked for by load(i, operand).
template <int kCount, class Load, class Use>
__device__ inline void pipelined(const Load& load, const Use& use) {
  constexpr int kAhead = 3;
  std::uint32_t b[kAhead + 1][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, b[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i + kAhead < kCount) load(i + kAhead, b[(i + kAhead) % (kAhead + 1)]);
    use(i, b[i % (kAhead + 1)]);
  }
}

// sums[16 rows x 64 tokens] += a[16 x 128] tile[64 tokens x 128]^T
__device__ inline void multiply_by_rows(float (&sums)[8][4], const uint4 (&a)[kSteps], const bf16* tile, int lane) {
  const char* bytes = reinterpret_cast<const char*>(tile);
  pipelined<kSteps * 4>(
      [&](int i, std::uint32_t (&b)[4]) {
        load_matrices(b, shared_address(bytes + tile_offset<kGdnDim * 2>(i % 4 * 16 + lane / 16 * 8 + lane % 8,
                                                                         i / 4 * 2 + lane / 8 % 2)));
      },
      [&](int i, const std::uint32_t (&b)[4]) {
        mma(sums[i % 4 * 2], a[i / 4], b[0], b[1]);
        mma(sums[i % 4 * 2 + 1], a[i / 4], b[2], b[3]);
      });
}

template <class State>
__device__ inline float2 load_two(const State* address);
template <>
__device__ inline float2 load_two(const float* address) {
  return *reinterpret_cast<const float2*>(address);
}
template <>
__device__ inline float2 load_two(const bf16* address) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(address));
}
__device__ inline void store_two(float* address, float a, float b) {
  *reinterpret_cast<float2*>(address) = float2{a, b};
}
__device__ inline void store_two(bf16* address, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(address) = __floats2bfloat162_rn(a, b);
}

// Walks a warp's 16 rows of the state through the chunks; `rows` is where they lie.
template <class State, class Release>
__device__ void walk_state(Shared& shared, State* rows, bool has_state, int num_chunks, int pair, int lane,
                           const Release& release) {
  const int group = lane / 4, quad = lane % 4;
  float s[16][4];  // 8 columns each
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 two{};
      if (has_state) two = load_two<State>(rows + (group + half * 8) * kGdnDim + i * 8 + quad * 2);
      s[i][2 * half] = two.x, s[i][2 * half + 1] = two.y;
    }
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int buffer = chunk % 2;
    uint4 a[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) a[i] = operand(s[2 * i], s[2 * i + 1]);
    if (chunk >= 2) meet(kHandedOver, pair, buffer);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) shared.state[pair][buffer][i][lane] = a[i];
    announce(kStateFull, pair, buffer);

    const Stage& stage = shared.stages[chunk % kStages];
    barrier_wait(&shared.full[chunk % kStages], chunk / kStages & 1);
    float v[8][4] = {};  // 8 tokens each
    multiply_by_rows(v, a, stage.w, lane);
    const char* u = reinterpret_cast<const char*>(stage.u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t bits[4];
      load_matrices_transposed(bits, shared_address(u + tile_offset<kGdnRows * 2>(i * 16 + lane / 16 * 8 + lane % 8,
                                                                                  pair * 2 + lane / 8 % 2)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits[j]));
        float (&sum)[4] = v[2 * i + j / 2];
        sum[j % 2 * 2] = two.x - sum[j % 2 * 2], sum[j % 2 * 2 + 1] = two.y - sum[j % 2 * 2 + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.values[pair][buffer][i][lane] = operand(v[2 * i], v[2 * i + 1]);
    announce(kValuesFull, pair, buffer);

    const float decay = stage.from_start[kGdnChunk - 1];
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i][0] *= decay, s[i][1] *= decay, s[i][2] *= decay, s[i][3] *= decay;
    const char* k = reinterpret_cast<const char*>(stage.keys.k);
    uint4 left[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 to_end = *reinterpret_cast<const float2*>(stage.to_end + i * 8 + quad * 2);
      v[i][0] *= to_end.x, v[i][1] *= to_end.y, v[i][2] *= to_end.x, v[i][3] *= to_end.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = operand(v[2 * i], v[2 * i + 1]);
    pipelined<4 * 8>(
        [&](int i, std::uint32_t (&b)[4]) {
          load_matrices_transposed(
              b, shared_address(k + tile_offset<kGdnDim * 2>(i / 8 * 16 + lane % 16, i % 8 * 2 + lane / 16)));
        },
        [&](int i, const std::uint32_t (&b)[4]) {
          mma(s[i % 8 * 2], left[i / 8], b[0], b[1]);
          mma(s[i % 8 * 2 + 1], left[i / 8], b[2], b[3]);
        });
    __syncwarp();
    if (lane == 0) release(chunk % kStages);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_two(rows + (group + half * 8) * kGdnDim + i * 8 + quad * 2, s[i][2 * half], s[i][2 * half + 1]);
}

// The output of the same rows: element `out` is of the first token and row.
template <class T, class Release>
__device__ void walk_output(Shared& shared, T* out, std::int64_t out_stride, std::int64_t num_tokens, int num_chunks,
                            int pair, int lane, const Release& release) {
  const int group = lane / 4, quad = lane % 4;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int buffer = chunk % 2;
    const Stage& stage = shared.stages[chunk % kStages];
    meet(kStateFull, pair, buffer);
    uint4 a[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) a[i] = shared.state[pair][buffer][i][lane];
    barrier_wait(&shared.full[chunk % kStages], chunk / kStages & 1);
    float o[8][4] = {};  // 8 tokens each
    multiply_by_rows(o, a, stage.keys.q, lane);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 decay = *reinterpret_cast<const float2*>(stage.from_start + i * 8 + quad * 2);
      o[i][0] *= decay.x, o[i][1] *= decay.y, o[i][2] *= decay.x, o[i][3] *= decay.y;
    }
    meet(kValuesFull, pair, buffer);
    const char* p = reinterpret_cast<const char*>(stage.p);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 left = shared.values[pair][buffer][step][lane];
#pragma unroll
      for (int tokens = step; tokens < 4; ++tokens) {  // no token sees a later one
        std::uint32_t b[4];
        load_matrices(b, shared_address(p + tile_offset<kGdnChunk * 2>(tokens * 16 + lane / 16 * 8 + lane % 8,
                                                                       step * 2 + lane / 8 % 2)));
        mma(o[2 * tokens], left, b[0], b[1]);
        mma(o[2 * tokens + 1], left, b[2], b[3]);
      }
    }
    if (chunk + 2 < num_chunks) announce(kHandedOver, pair, buffer);
    __syncwarp();
    if (lane == 0) release(chunk % kStages);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t low = transposed(pack<T>(o[i][0], o[i][1]));
      const std::uint32_t high = transposed(pack<T>(o[i][2], o[i][3]));
      const std::int64_t token = static_cast<std::int64_t>(chunk) * kGdnChunk + i * 8 + group;
      if (token < num_tokens) {
        *reinterpret_cast<std::uint32_t*>(out + token * out_stride + quad * 2) = low;
        *reinterpret_cast<std::uint32_t*>(out + token * out_stride + 8 + quad * 2) = high;
      }
    }
  }
}

template <class T, class State>
__global__ void __launch_bounds__(kThreads, 1) gdn_walk_mma_kernel(const __grid_constant__ GdnWalkParams<T, State> p) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200  // can_prefill_gdn
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t seq = blockIdx.z;
  const int head = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
  const std::int64_t slot = p.state_indices[seq * p.state_indices_stride];
  const std::int64_t begin = p.start[seq], num_tokens = p.start[seq + 1] - begin;
  if (slot < 0 || num_tokens == 0) return;  // the whole cluster
  const int num_chunks = static_cast<int>((num_tokens + kGdnChunk - 1) / kGdnChunk);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kConsumers);
      barrier_init(&shared.cluster_empty[i], kConsumers * kBlocks);
    }
  }
  fence_barrier_init();
  cluster.sync();

  const auto release = [&](int stage) {
    if (part != 0) barrier_arrive(&shared.empty[stage]);
    barrier_arrive_at(&shared.cluster_empty[stage], 0);
  };
  if (warp == kConsumers) {
    if (lane == 0) {
      const int ratio = p.shape.num_value_heads / p.shape.num_key_heads;
      const std::int64_t first_chunk = first_piece<kGdnChunk>(begin, seq);
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        Stage& stage = shared.stages[chunk % kStages];
        std::uint64_t* full = &shared.full[chunk % kStages];
        const GdnValueTiles& values = p.workspace.values[(first_chunk + chunk) * p.shape.num_value_heads + head];
        barrier_wait(part == 0 ? &shared.cluster_empty[chunk % kStages] : &shared.empty[chunk % kStages],
                     chunk / kStages & 1 ^ 1);
        barrier_expect(full, sizeof(stage.keys) + kSharedValueBytes + sizeof(stage.u));
        bulk_load(stage.u, values.u[part], sizeof(stage.u), full);
        if (part == 0) {
          constexpr std::uint16_t kAll = (1 << kBlocks) - 1;
          bulk_load_multicast(stage.w, values.w, kSharedValueBytes, full, kAll);
          bulk_load_multicast(&stage.keys,
                              p.workspace.keys + (first_chunk + chunk) * p.shape.num_key_heads + head / ratio,
                              sizeof(stage.keys), full, kAll);
        }
      }
    }
  } else {
    const int pair = warp % kPairs, row = part * kGdnRows + pair * 16;
    if (warp < kPairs)
      walk_state(shared, p.temporal + slot * p.slot_stride + head * p.head_stride + row * kGdnDim,
                 p.has_initial_state[seq] != 0, num_chunks, pair, lane, release);
    else
      walk_output(shared, p.out + begin * p.out_stride + static_cast<std::int64_t>(head) * kGdnDim + row, p.out_stride,
                  num_tokens, num_chunks, pair, lane, release);
  }
  __syncwarp();
  cluster.sync();  // no block leaves while another copies into it or arrives at its barriers
#endif
}

}  // namespace

void walk_gdn_chunks_mma(ops::Stream stream, const GdnPrefillArgs& args) {
  launch_gdn_walk(stream, args, kBlocks, kBlocks, kThreads, sizeof(Shared),
                  []<class T, class State>(T, State) { return gdn_walk_mma_kernel<T, State>; });
}

}  // namespace deltaic::cuda

// The delta rule from chunk to chunk (docs/models.md, "Gated delta rule in chunks"), after prepare_gdn_chunks, by wgmma
// (sm_90a).
//   a block has kGdnRows rows of the state of a (sequence, value head); two are a cluster and share the tiles of a
//   chunk, of which each loads a half for both. Clusters of four would leave multiprocessors without work: 30 fit an
//   H200, and a model has 32 heads
//   one warpgroup keeps the state, transposed, as the sums of products; its rounded copy in shared memory is a factor
//   of the next chunk. Another takes that and the values and computes the output. One warp loads
//   bound by the latency of a chunk (two products in a row, each waiting for what the one before left in shared memory)
//   times the chunks of the longest sequence, then by the copies into a block, 60 KiB a chunk
#include <cooperative_groups.h>

#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/ops/gdn_walk.cuh"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;

using bf16 = __nv_bfloat16;
constexpr int kParts = kGdnDim / kGdnRows;  // blocks of a head
constexpr int kBlocks = 2;                  // of a cluster
constexpr int kGroupThreads = 128;          // of a warpgroup
constexpr int kConsumers = 2 * kGroupThreads / 32;
constexpr int kThreads = kConsumers * 32 + 32;
constexpr int kStages = 3;
constexpr int kHalfBytes = kGdnChunk * 128;  // 64 channels of a tile of k, q or w
constexpr int kStep = 16;                    // of the summed dimension, a product

struct Stage {
  alignas(1024) GdnKeyTiles keys;
  alignas(1024) bf16 w[kGdnChunk * kGdnDim];
  bf16 p[kGdnChunk * kGdnChunk];
  float from_start[kGdnChunk], to_end[kGdnChunk];
  alignas(128) bf16 u[kGdnChunk * kGdnRows];
};
constexpr int kSharedValueBytes = offsetof(GdnValueTiles, u);  // w, p and the decays
static_assert(offsetof(Stage, u) - offsetof(Stage, w) == kSharedValueBytes);

// Rows of 32 value channels, swizzled by 64 bytes.
struct Shared {
  Stage stages[kStages];
  alignas(1024) bf16 state[2][kGdnDim * kGdnRows];  // S^T before a chunk; a row a key channel
  bf16 values[2][kGdnChunk * kGdnRows];             // V' = U - W S^T; a row a token
  bf16 decayed_values[kGdnChunk * kGdnRows];        // e^(G_last - G_i) V'
  std::uint64_t full[kStages], empty[kStages];      // empty: by the warps of all blocks
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // it begins at a multiple of 1024
static_assert(kSharedBytes <= 227 * 1024);
static_assert(sizeof(GdnKeyTiles) % (kBlocks * 16) == 0 && kSharedValueBytes % (kBlocks * 16) == 0);

// Where the two warpgroups meet: named barriers, one a buffer. The one who has written or read announces it, the other
// meets it.
enum Meeting { kStateFull, kValuesFull, kHandedOver };
__device__ inline int barrier_of(Meeting what, int buffer) { return 1 + what * 2 + buffer; }  // 0 is the block's
__device__ inline void meet(Meeting what, int buffer) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier_of(what, buffer)), "n"(2 * kGroupThreads) : "memory");
}
__device__ inline void announce(Meeting what, int buffer) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier_of(what, buffer)), "n"(2 * kGroupThreads) : "memory");
}
// The warpgroup of the state alone.
__device__ inline void group_sync() { asm volatile("bar.sync 7, %0;" ::"n"(kGroupThreads) : "memory"); }

// sums[64 tokens x 32] += tile[64 tokens x 128] state[128 x 32]
__device__ inline void multiply_state(float (&sums)[16], const bf16* tile, const bf16* state) {
  const std::uint32_t a = shared_address(tile), b = shared_address(state);
#pragma unroll
  for (int i = 0; i < kGdnDim / kStep; ++i)
    wgmma_shared<false>(sums, rows_descriptor(a + i / 4 * kHalfBytes) + i % 4 * 2,
                        narrow_descriptor(b + i * kStep * kGdnRows * 2), 1);
}

// Two rounded sums of a row, in columns 8 i + 2 quad ....
__device__ inline void store_two(bf16* tile, int row, int i, int quad, float first, float second) {
  *reinterpret_cast<std::uint32_t*>(reinterpret_cast<char*>(tile) + tile_offset<kGdnRows * 2>(row, i) + quad * 4) =
      pack<bf16>(first, second);
}

// Walks the block's rows of the state through the chunks; `rows` is where they lie. Sums of the state: half m, column
// 8 i + 2 quad + c % 2 of row 64 m + 16 warp + group + c / 2 * 8 of S^T are s[m][4 i + c].
template <class State, class Release>
__device__ void walk_state(Shared& shared, State* rows, bool has_state, int num_chunks, const Release& release) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quad = lane % 4, row = warp * 16 + group;
  const auto element = [&](int m, int j) {
    return rows + (j / 4 * 8 + quad * 2 + j % 2) * kGdnDim + m * 64 + row + j % 4 / 2 * 8;
  };
  float s[2][16];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < 16; ++j) s[m][j] = has_state ? to_float(*element(m, j)) : 0.0F;

  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int buffer = chunk % 2;
    if (chunk >= 2) meet(kHandedOver, buffer);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_two(shared.state[buffer], m * 64 + row, i, quad, s[m][4 * i], s[m][4 * i + 1]);
        store_two(shared.state[buffer], m * 64 + row + 8, i, quad, s[m][4 * i + 2], s[m][4 * i + 3]);
      }
    fence_async_shared();
    announce(kStateFull, buffer);
    group_sync();

    const Stage& stage = shared.stages[chunk % kStages];
    barrier_wait(&shared.full[chunk % kStages], chunk / kStages & 1);
    float v[16] = {};
    wgmma_fence();
    multiply_state(v, stage.w, shared.state[buffer]);
    wgmma_commit();
    std::uint32_t u[2][4];  // columns 16 half ... of the rows of v
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_matrices(u[half], shared_address(reinterpret_cast<const char*>(stage.u) +
                                            tile_offset<kGdnRows * 2>(warp * 16 + lane % 16, half * 2 + lane / 16)));
    const float to_end[2] = {stage.to_end[row], stage.to_end[row + 8]}, decay = stage.from_start[kGdnChunk - 1];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 16; ++j) s[m][j] *= decay;
    wgmma_wait<0>();
    hold_registers(v);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const float2 two = unpack<bf16>(u[i / 2][i % 2 * 2 + down]);
        const float first = two.x - v[4 * i + 2 * down], second = two.y - v[4 * i + 2 * down + 1];
        store_two(shared.values[buffer], row + 8 * down, i, quad, first, second);
        store_two(shared.decayed_values, row + 8 * down, i, quad, first * to_end[down], second * to_end[down]);
      }
    fence_async_shared();
    announce(kValuesFull, buffer);
    group_sync();

    const std::uint32_t k = shared_address(stage.keys.k), values = shared_address(shared.decayed_values);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGdnChunk / kStep; ++i)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        wgmma_shared<true>(s[m], columns_descriptor(k + m * kHalfBytes + i * kStep * 128, kHalfBytes),
                           narrow_descriptor(values + i * kStep * kGdnRows * 2), 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold_registers(s[0]);
    hold_registers(s[1]);
    release(chunk % kStages);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < 16; ++j) *element(m, j) = from_float<State>(s[m][j]);
}

// The output of the same rows: element `out` is of the first token and row.
template <class T, class Release>
__device__ void walk_output(Shared& shared, T* out, std::int64_t out_stride, std::int64_t num_tokens, int num_chunks,
                            const Release& release) {
  const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int quad = lane % 4, row = warp * 16 + lane / 4;
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int buffer = chunk % 2;
    const Stage& stage = shared.stages[chunk % kStages];
    barrier_wait(&shared.full[chunk % kStages], chunk / kStages & 1);
    const float from_start[2] = {stage.from_start[row], stage.from_start[row + 8]};
    float o[16] = {};
    meet(kStateFull, buffer);
    wgmma_fence();
    multiply_state(o, stage.keys.q, shared.state[buffer]);
    wgmma_commit();
    wgmma_wait<0>();
    hold_registers(o);
#pragma unroll
    for (int j = 0; j < 16; ++j) o[j] *= from_start[j % 4 / 2];
    meet(kValuesFull, buffer);
    const std::uint32_t values = shared_address(shared.values[buffer]);
    const std::uint64_t p = rows_descriptor(shared_address(stage.p));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGdnChunk / kStep; ++i)
      wgmma_shared<false>(o, p + i * 2, narrow_descriptor(values + i * kStep * kGdnRows * 2), 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold_registers(o);
    if (chunk + 2 < num_chunks) announce(kHandedOver, buffer);
    release(chunk % kStages);
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack<T>(o[4 * i + 2 * down], o[4 * i + 2 * down + 1]);
      const uint4 piece = transposed_in_quad(words);
      const std::int64_t token = static_cast<std::int64_t>(chunk) * kGdnChunk + row + 8 * down;
      if (token < num_tokens) *reinterpret_cast<uint4*>(out + token * out_stride + quad * 8) = piece;
    }
  }
}

template <class T, class State>
__global__ void __launch_bounds__(kThreads, 1) gdn_walk_kernel(const __grid_constant__ GdnWalkParams<T, State> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes + (-shared_address(shared_bytes) & 1023));
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], kConsumers * kBlocks);
    }
    fence_barrier_init();
  }
  cluster.sync();
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t seq = blockIdx.z;
  const int head = static_cast<int>(blockIdx.y), part = static_cast<int>(blockIdx.x);
  const std::int64_t slot = p.state_indices[seq * p.state_indices_stride];
  const std::int64_t begin = p.start[seq], num_tokens = p.start[seq + 1] - begin;
  if (slot < 0 || num_tokens <= 0) return;  // the whole cluster
  const int num_chunks = static_cast<int>((num_tokens + kGdnChunk - 1) / kGdnChunk);

  const auto release = [&](int stage) {
    if (lane < kBlocks) barrier_arrive_at(&shared.empty[stage], lane);
  };
  if (warp == kConsumers) {
    if (lane == 0) {
      const int ratio = p.shape.num_value_heads / p.shape.num_key_heads;
      const std::int64_t first_chunk = first_piece<kGdnChunk>(begin, seq);
      // This block's part, to all blocks.
      const auto copy_part = [&](void* to, const void* from, int num_bytes, std::uint64_t* full) {
        const int offset = part % kBlocks * (num_bytes / kBlocks);
        bulk_load_multicast(static_cast<char*>(to) + offset, static_cast<const char*>(from) + offset,
                            num_bytes / kBlocks, full, (1 << kBlocks) - 1);
      };
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        Stage& stage = shared.stages[chunk % kStages];
        std::uint64_t* full = &shared.full[chunk % kStages];
        const GdnValueTiles& values = p.workspace.values[(first_chunk + chunk) * p.shape.num_value_heads + head];
        barrier_wait(&shared.empty[chunk % kStages], chunk / kStages & 1 ^ 1);
        barrier_expect(full, sizeof(stage.keys) + kSharedValueBytes + sizeof(stage.u));
        bulk_load(stage.u, values.u[part], sizeof(stage.u), full);
        copy_part(stage.w, values.w, kSharedValueBytes, full);
        copy_part(&stage.keys, p.workspace.keys + (first_chunk + chunk) * p.shape.num_key_heads + head / ratio,
                  sizeof(stage.keys), full);
      }
    }
  } else {
    const int row = part * kGdnRows;
    if (warp < kConsumers / 2)
      walk_state(shared, p.temporal + slot * p.slot_stride + head * p.head_stride + row * kGdnDim,
                 p.has_initial_state[seq] != 0, num_chunks, release);
    else
      walk_output(shared, p.out + begin * p.out_stride + static_cast<std::int64_t>(head) * kGdnDim + row, p.out_stride,
                  num_tokens, num_chunks, release);
  }
  __syncwarp();
  cluster.sync();  // no block leaves while another copies into it or arrives at its barriers
#else
  __trap();  // not built for this chip
#endif
}

}  // namespace

void walk_gdn_chunks(ops::Stream stream, const GdnPrefillArgs& args) {
  launch_gdn_walk(stream, args, kParts, kBlocks, kThreads, kSharedBytes,
                  []<class T, class State>(T, State) { return gdn_walk_kernel<T, State>; });
}

}  // namespace deltaic::cuda

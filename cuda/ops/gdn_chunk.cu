// What of a chunk of the delta rule does not depend on the state (docs/models.md, "Gated delta rule in chunks"): q and
// k normalised, W, U and (Q K^T) * D.
//   a block a (chunk, value head); of its eight warps two share 16 tokens, and split the columns of every product
//   (1 + A)^-1 in f32: 16 x 16 blocks on the diagonal by substitution, then twice [[B, 0], [C, D]]^-1 has
//   -D^-1 C B^-1 below; the unused upper half keeps the products in between
//   bound by memory: reads q, k, v, writes 41 KiB a value head and chunk
#include "cuda/ops/gdn_chunk.cuh"

#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_math.cuh"
#include "cuda/ops/gdn_prefill.h"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPitch = 68;  // floats of a row of the matrix to invert
constexpr int kRowBytes = kGdnDim * 2;
constexpr int kTileBytes = kGdnChunk * kRowBytes;
using bf16 = __nv_bfloat16;

template <class T>
struct Params {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  const T *qkv, *proj;
  std::int64_t qkv_stride, proj_stride;
  const float *A_log, *dt_bias;
  const std::int32_t *start, *state_indices;
  int num_seqs;
  std::int64_t state_indices_stride;
  GdnWorkspace workspace;
};

struct Shared {
  alignas(128) char k[kTileBytes];
  char q[kTileBytes];                             // later v
  alignas(128) float matrix[kGdnChunk * kPitch];  // A, then its inverse
  float log_decays[kGdnChunk], beta[kGdnChunk];   // summed up; 0 past the end
};
constexpr int kBlocks = 4;  // a multiprocessor
static_assert(kBlocks * (sizeof(Shared) + 1024) <= 228 * 1024);

// 16 bytes from global to shared memory, or zeros.
__device__ inline void copy_async(void* shared, const void* global, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ inline void wait_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Normalises the rows of q or k into a tile. `pieces` are 16 bytes each of rows thread / 16 + 16 i.
template <class T>
__device__ void normalize(const uint4 (&pieces)[4], float scale, char* tile) {
  const int piece = static_cast<int>(threadIdx.x) % 16, first_row = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[8], sum = 0.0F;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = to_float(reinterpret_cast<const T*>(&pieces[i])[j]), sum += x[j] * x[j];
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0U, sum, mask);
    const float factor = scale * rsqrtf(sum + 1e-6F);
    const uint4 packed = {pack<bf16>(x[0] * factor, x[1] * factor), pack<bf16>(x[2] * factor, x[3] * factor),
                          pack<bf16>(x[4] * factor, x[5] * factor), pack<bf16>(x[6] * factor, x[7] * factor)};
    *reinterpret_cast<uint4*>(tile + tile_offset<kRowBytes>(first_row + i * 16, piece)) = packed;
  }
}

// Rows 16 * warp ... + 15 of (1 + A)^-1 within the diagonal block, in place; a lane a column.
__device__ inline void invert_diagonal_block(float* matrix, int warp, int lane) {
  float* block = matrix + warp * 16 * (kPitch + 1);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == lane % 16 ? 1.0F : 0.0F;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(block + i * kPitch + j);
      sum -= a.x * x[j];
      if (j + 1 < i) sum -= a.y * x[j + 1];
      if (j + 2 < i) sum -= a.z * x[j + 2];
      if (j + 3 < i) sum -= a.w * x[j + 3];
    }
    x[i] = sum;
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) block[i * kPitch + lane] = x[i];
}

// c[1 x 4] = scale * a[1 x 4 * num_fours] b[4 * num_fours x 4], all in the matrix.
__device__ inline void multiply(const float* a, const float* b, int num_fours, float scale, float* c) {
  float sum[4] = {};
#pragma unroll 2
  for (int k = 0; k < num_fours * 4; k += 4) {
    float left[4];
    *reinterpret_cast<float4*>(left) = *reinterpret_cast<const float4*>(a + k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 right = *reinterpret_cast<const float4*>(b + (k + j) * kPitch);
      sum[0] += left[j] * right.x, sum[1] += left[j] * right.y, sum[2] += left[j] * right.z,
          sum[3] += left[j] * right.w;
    }
  }
  *reinterpret_cast<float4*>(c) = float4{scale * sum[0], scale * sum[1], scale * sum[2], scale * sum[3]};
}

// matrix = (1 + matrix)^-1 of a strictly lower matrix. What lies above the diagonal blocks is undefined after.
__device__ inline void invert(float* matrix) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto at = [&](int row, int column) { return matrix + row * kPitch + column; };
  if (warp < 4) invert_diagonal_block(matrix, warp, lane);
  __syncthreads();
  {
    const int first = thread / 64 * 32, second = first + 16, row = thread % 64 / 4, column = thread % 4 * 4;
    if (warp < 4)
      multiply(at(second + row, first), at(first, first + column), 4, 1.0F, at(first + row, second + column));
    __syncthreads();
    if (warp < 4)
      multiply(at(second + row, second), at(first, second + column), 4, -1.0F, at(second + row, first + column));
    __syncthreads();
  }
  {
    // Warps agree on the block column of the first product and on the block row of the second: what is zero there is
    // left out, and what is undefined with it.
    const int row = warp / 2 * 8 + lane / 4, column = (warp % 2 * 4 + lane % 4) * 4;
    const int zeros = warp % 2 * 16;
    multiply(at(32 + row, zeros), at(zeros, column), (32 - zeros) / 4, 1.0F, at(row, 32 + column));
    __syncthreads();
    multiply(at(32 + row, 32), at(0, 32 + column), warp / 4 == 0 ? 4 : 8, -1.0F, at(32 + row, column));
  }
  __syncthreads();
}

// Operand a of mma: rows 16 * warp ... of the inverse, columns 16 * block ..., each column times its factor.
template <class T>
__device__ inline void load_inverse(const float* matrix, int row, int column, const float (&factor)[4],
                                    std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(matrix + (row + i % 2 * 8) * kPitch + column + i / 2 * 8);
    a[i] = pack<T>(two.x * factor[i / 2 * 2], two.y * factor[i / 2 * 2 + 1]);
  }
}

// sums[16 tokens of the warp x 64 columns from piece first_piece] = a[16 x 64] * tile, a lower triangular.
template <class T>
__device__ inline void multiply_tile(const std::uint32_t (&a)[4][4], const char* tile, int first_piece, int warp,
                                     int lane, float (&sums)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0F;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      std::uint32_t b[4];
      const int row = block * 16 + lane % 16, piece = first_piece + pair * 2 + lane / 16;
      load_matrices_transposed(b, shared_address(tile + tile_offset<kRowBytes>(row, piece)));
      mma_m16n8k16<T>(sums[2 * pair], a[block][0], a[block][1], a[block][2], a[block][3], b[0], b[1]);
      mma_m16n8k16<T>(sums[2 * pair + 1], a[block][0], a[block][1], a[block][2], a[block][3], b[2], b[3]);
    }
  }
}

// Stores four words of each lane of a quad as four pieces, a lane one at its `offset`: piece q has word q of every
// lane.
__device__ inline void store_pieces(bf16* tile, int offset, const std::uint32_t (&words)[4]) {
  *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + offset) = transposed_in_quad(words);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) gdn_chunk_kernel(const __grid_constant__ Params<T> p) {
#if __CUDA_ARCH__ >= 900  // can_prefill_gdn
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Piece chunk = find_piece<kGdnChunk>(p.start, p.num_seqs, blockIdx.x);
  if (chunk.seq < 0 || p.state_indices[chunk.seq * p.state_indices_stride] < 0) return;
  const int num_tokens =
      static_cast<int>(chunk.begin + kGdnChunk < chunk.seq_end ? kGdnChunk : chunk.seq_end - chunk.begin);
  const int head = static_cast<int>(blockIdx.y), ratio = p.shape.num_value_heads / p.shape.num_key_heads;
  const int key_head = head / ratio, in_group = head % ratio;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, group = lane / 4, quad = lane % 4;
  const int warp = thread / 32 % 4, half = thread / 128;  // which 16 tokens, which half of the columns
  const T* rows = p.qkv + chunk.begin * p.qkv_stride;
  const std::int64_t key_dim = static_cast<std::int64_t>(p.shape.num_key_heads) * kGdnDim;
  {
    const int piece = thread % 16, first_row = thread / 16;
    uint4 q[4], k[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i * 16;
      const bool is_there = row < num_tokens;
      const T* at = rows + (is_there ? row : 0) * p.qkv_stride + piece * 8;
      q[i] = k[i] = uint4{0, 0, 0, 0};
      if (is_there) {
        q[i] = *reinterpret_cast<const uint4*>(at + key_head * kGdnDim);
        k[i] = *reinterpret_cast<const uint4*>(at + key_dim + key_head * kGdnDim);
      }
    }
    if (thread < 32) {  // the gates, two tokens a lane
      const T* a = p.proj + p.layout.a + key_head * p.layout.a_group_stride + in_group + chunk.begin * p.proj_stride;
      const T* b = p.proj + p.layout.b + key_head * p.layout.b_group_stride + in_group + chunk.begin * p.proj_stride;
      float g[2] = {}, beta[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (2 * lane + i < num_tokens) {
          g[i] = log_decay(to_float(a[(2 * lane + i) * p.proj_stride]), p.A_log[head], p.dt_bias[head]);
          beta[i] = sigmoid(to_float(b[(2 * lane + i) * p.proj_stride]));
        }
      float sum = g[0] + g[1];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0U, sum, step);
        if (lane >= step) sum += other;
      }
      float before = __shfl_up_sync(~0U, sum, 1);
      if (lane == 0) before = 0.0F;
      shared.log_decays[2 * lane] = before + g[0];
      shared.log_decays[2 * lane + 1] = before + g[0] + g[1];
      shared.beta[2 * lane] = beta[0], shared.beta[2 * lane + 1] = beta[1];
    }
    normalize<T>(q, 0.08838834764831845F, shared.q);  // kGdnDim^-0.5
    normalize<T>(k, 1.0F, shared.k);
  }
  fence_async_shared();
  __syncthreads();
  static_assert(offsetof(Shared, q) == offsetof(Shared, k) + kTileBytes && sizeof(GdnKeyTiles) == 2 * kTileBytes);
  if (thread == 0 && in_group == 0) {
    bulk_store(p.workspace.keys + static_cast<std::int64_t>(blockIdx.x) * p.shape.num_key_heads + key_head, shared.k,
               2 * kTileBytes);
    bulk_commit();
  }
  GdnValueTiles& target = p.workspace.values[static_cast<std::int64_t>(blockIdx.x) * p.shape.num_value_heads + head];
  const float *sums = shared.log_decays, *beta = shared.beta;
  if (thread < kGdnChunk) {
    target.from_start[thread] = __expf(sums[thread]);
    target.to_end[thread] = __expf(fminf(sums[kGdnChunk - 1] - sums[thread], 0.0F));
  }

  float* const matrix = shared.matrix;
  {
    // The blocks of 16 columns that this warp computes: half, half + 2, up to the diagonal.
    float kk[2][2][4] = {}, qk[2][2][4] = {};
#pragma unroll
    for (int step = 0; step < kGdnDim / 16; ++step) {
      std::uint32_t q[4], k[4];
      const int at = tile_offset<kRowBytes>(warp * 16 + lane % 16, step * 2 + lane / 16);
      load_matrices(q, shared_address(shared.q + at));
      load_matrices(k, shared_address(shared.k + at));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = half + 2 * i;
        if (block > warp) break;
        std::uint32_t b[4];
        load_matrices(b, shared_address(shared.k + tile_offset<kRowBytes>(block * 16 + lane / 16 * 8 + lane % 8,
                                                                          step * 2 + lane / 8 % 2)));
        mma_m16n8k16<bf16>(kk[i][0], k[0], k[1], k[2], k[3], b[0], b[1]);
        mma_m16n8k16<bf16>(kk[i][1], k[0], k[1], k[2], k[3], b[2], b[3]);
        mma_m16n8k16<bf16>(qk[i][0], q[0], q[1], q[2], q[3], b[0], b[1]);
        mma_m16n8k16<bf16>(qk[i][1], q[0], q[1], q[2], q[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = warp * 16 + down * 8 + group;
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const int column = (half + 2 * i) * 16 + tile * 8 + quad * 2;
          float a[2] = {}, scores[2] = {};
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (column + j <= row) {
              const float decay = __expf(fminf(sums[row] - sums[column + j], 0.0F));
              scores[j] = qk[i][tile][down * 2 + j] * decay;
              if (column + j < row) a[j] = beta[row] * kk[i][tile][down * 2 + j] * decay;
            }
          *reinterpret_cast<float2*>(matrix + row * kPitch + column) = float2{a[0], a[1]};
          words[2 * i + tile] = pack<bf16>(scores[0], scores[1]);
        }
      store_pieces(target.p, tile_offset<kGdnChunk * 2>(row, (half + quad / 2 * 2) * 2 + quad % 2), words);
    }
  }
  if (thread == 0) bulk_wait_read<0>();
  __syncthreads();  // q has been read
  {
    const int piece = thread % 16, first_row = thread / 16;
#pragma unroll
    for (int row = first_row; row < kGdnChunk; row += kThreads / 16) {
      const bool is_there = row < num_tokens;
      copy_async(shared.q + tile_offset<kRowBytes>(row, piece),
                 rows + (is_there ? row : 0) * p.qkv_stride + 2 * key_dim + head * kGdnDim + piece * 8, is_there);
    }
  }
  invert(matrix);
  wait_async_copies();
  __syncthreads();  // the values are there

  const int row = warp * 16 + group;
  // The inverse times a tile, columns of the inverse times factor_of(column).
  const auto multiply_inverse = [&]<class U>(U, const auto& factor_of, const char* tile, float (&product)[8][4]) {
    std::uint32_t inverse[4][4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > warp) break;
      const int column = block * 16 + quad * 2;
      float factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factor[i] = factor_of(column + i / 2 * 8 + i % 2);
      load_inverse<U>(matrix, row, column, factor, inverse[block]);
    }
    multiply_tile<U>(inverse, tile, half * 8, warp, lane, product);
  };
  float product[8][4];
  const auto words_of = [&](int first, int down, std::uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<bf16>(product[first + i][2 * down], product[first + i][2 * down + 1]);
  };
  multiply_inverse(T{}, [&](int column) { return beta[column]; }, shared.q, product);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t words[4];
    words_of(i / 2 * 4, i % 2, words);
    store_pieces(target.u[half * 2 + i / 2], tile_offset<kGdnRows * 2>(row + i % 2 * 8, quad), words);
  }
  multiply_inverse(bf16{}, [&](int column) { return beta[column] * __expf(sums[column]); }, shared.k, product);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t words[4];
    words_of(i / 2 * 4, i % 2, words);
    store_pieces(target.w, tile_offset<kRowBytes>(row + i % 2 * 8, half * 8 + i / 2 * 4 + quad), words);
  }
#endif
}

}  // namespace

void prepare_gdn_chunks(ops::Stream stream, const GdnPrefillArgs& args) {
  const int num_seqs = static_cast<int>(args.sequences.state_indices.shape[0]);
  const std::int64_t num_chunks = num_pieces<kGdnChunk>(args.qkv.shape[0], num_seqs);
  visit_half(args.qkv.dtype, [&]<class T>(T) {
    const Params<T> params{.shape = args.shape,
                           .layout = args.layout,
                           .qkv = static_cast<const T*>(args.qkv.data),
                           .proj = static_cast<const T*>(args.proj.data),
                           .qkv_stride = args.qkv.stride[0],
                           .proj_stride = args.proj.stride[0],
                           .A_log = static_cast<const float*>(args.A_log.data),
                           .dt_bias = static_cast<const float*>(args.dt_bias.data),
                           .start = static_cast<const std::int32_t*>(args.sequences.query_start_loc.data),
                           .state_indices = static_cast<const std::int32_t*>(args.sequences.state_indices.data),
                           .num_seqs = num_seqs,
                           .state_indices_stride = args.sequences.state_indices.stride[0],
                           .workspace = GdnWorkspace(args.workspace.data, args.shape, num_chunks)};
    const auto kernel = gdn_chunk_kernel<T>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
    const DependentLaunch launch{
        .grid = dim3(static_cast<unsigned>(num_chunks), static_cast<unsigned>(args.shape.num_value_heads)),
        .block = dim3(kThreads),
        .stream = native(stream),
        .shared_bytes = sizeof(Shared)};
    launch(kernel, params);
  });
}

}  // namespace deltaic::cuda

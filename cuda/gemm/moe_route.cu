// Norm, router and choice of the experts for 1 to 16 tokens.
//   a cluster of 16 blocks shares the experts out, kTiles tiles of 8 rows a block, which are in shared memory before
//   the wait for the previous kernel; warps split the columns; products are those of tile_stream.cuh
//   logits go to the block of their token, whose first warp chooses
//   what a token gets does not depend on the others; bound by latency
#include <cooperative_groups.h>

#include <algorithm>

#include "cpp/src/check.h"
#include "cpp/src/ops/moe.h"
#include "cuda/device/async_copy.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/gemm/tile_stream.cuh"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"
#include "cuda/ops/top_experts.cuh"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 16, kWarps = 8, kThreads = kWarps * 32, kMaxTokens = 16;
constexpr std::size_t kStaticBytes = 1024;  // shared memory of stage_tokens and block_sum, rounded up

template <class T>
struct Params {
  const T* x;
  std::int64_t x_stride;
  const float* norm_weight;
  float eps;
  const T* weight;
  bool has_shared, renormalize;
  int num_tokens, hidden, num_experts, k;
  std::int32_t* expert_ids;  // rows of k columns, and one more with a shared expert
  float* weights;
};

template <int kTiles>
struct Shared {
  float partial[kWarps][kTiles][kMaxTokens * kStreamTileRows];
  float logits[kBlocks * kTiles * kStreamTileRows];  // of the token whose number is that of the block
};

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads) moe_route_kernel(const __grid_constant__ Params<T> p) {
#if __CUDA_ARCH__ >= 900  // moe_route_fits
  extern __shared__ __align__(16) char memory[];
  constexpr int kRows = kTiles * kStreamTileRows;
  auto& shared = *reinterpret_cast<Shared<kTiles>*>(memory);
  const int row = p.hidden + kTokenPadding;                          // elements between rows
  T* const weights = reinterpret_cast<T*>(memory + sizeof(shared));  // [kRows, row]
  T* const x = weights + kRows * row;                                // [num_tokens, row]
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
  const int first_expert = rank * kRows, vectors = p.hidden / 8;

  cluster.barrier_arrive();
  for (int i = thread; i < kRows * vectors; i += kThreads) {
    const int expert = min(first_expert + i / vectors, p.num_experts - 1);  // what is past the end is not used
    async_copy_16(shared_address(weights + i / vectors * row + i % vectors * 8),
                  p.weight + static_cast<std::int64_t>(expert) * p.hidden + i % vectors * 8);
  }
  async_copy_commit();
  const NormFactors norm_factors = NormFactors::first(p.norm_weight, p.hidden);
  wait_for_previous_kernel();
  allow_next_kernel();
  stage_tokens<T, kWarps>(p.x, p.x_stride, p.num_tokens, p.hidden, p.norm_weight, norm_factors, p.eps, x, row);
  async_copy_wait<0>();
  __syncthreads();

  float even[kTiles][4] = {}, odd[kTiles][4] = {};
  const TokenFragment<T> fragment = token_fragment(x, row, p.num_tokens);
  const T* const w = weights + group * row + quad * 8;
  for (int column = warp * kLineColumns; column < p.hidden; column += kWarps * kLineColumns)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = column + half * 32;
      const uint4 a = *reinterpret_cast<const uint4*>(fragment.low + at);
      const uint4 b = *reinterpret_cast<const uint4*>(fragment.high + at);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 c = *reinterpret_cast<const uint4*>(w + tile * kStreamTileRows * row + at);
        mma_m16n8k16<T>(even[tile], a.x, b.x, a.y, b.y, c.x, c.y);
        mma_m16n8k16<T>(odd[tile], a.z, b.z, a.w, b.w, c.z, c.w);
      }
    }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int down = 0; down < 2; ++down)
      *reinterpret_cast<float2*>(&shared.partial[warp][tile][(group + down * 8) * kStreamTileRows + quad * 2]) = {
          even[tile][2 * down] + odd[tile][2 * down], even[tile][2 * down + 1] + odd[tile][2 * down + 1]};
  __syncthreads();
  cluster.barrier_wait();  // the others have begun: their memory may be written
  for (int i = thread; i < p.num_tokens * kRows; i += kThreads) {
    const int token = i / kRows, tile = i / kStreamTileRows % kTiles, in_tile = i % kStreamTileRows;
    float sum = 0.0F;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += shared.partial[j][tile][token * kStreamTileRows + in_tile];
    *cluster.map_shared_rank(&shared.logits[first_expert + i % kRows], token) = sum;
  }
  float shared_logit = 0.0F;
  if (p.has_shared && rank < p.num_tokens) {
    const T* const gate = p.weight + static_cast<std::int64_t>(p.num_experts) * p.hidden;
    float sum = 0.0F;
    for (int column = thread * 8; column < p.hidden; column += kThreads * 8) {
      const uint4 a = *reinterpret_cast<const uint4*>(x + rank * row + column);
      const uint4 b = __ldg(reinterpret_cast<const uint4*>(gate + column));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum += to_float(reinterpret_cast<const T*>(&a)[i]) * to_float(reinterpret_cast<const T*>(&b)[i]);
    }
    shared_logit = block_sum<kThreads>(sum);
  }
  cluster.sync();
  if (rank >= p.num_tokens || warp != 0) return;
  const int num_columns = p.k + (p.has_shared ? 1 : 0);
  std::int32_t* const ids = p.expert_ids + rank * num_columns;
  float* const factors = p.weights + rank * num_columns;
  if (p.has_shared && lane == 0) ids[p.k] = p.num_experts, factors[p.k] = 1.0F / (1.0F + expf(-shared_logit));
  top_experts([&](int expert) { return shared.logits[expert]; }, p.num_experts, p.k, p.renormalize,
              [&](int j, int id, float factor) { ids[j] = id, factors[j] = factor; });
#endif
}

int tiles_per_block(std::int64_t num_experts) {
  const std::int64_t tiles = (num_experts + kBlocks * kStreamTileRows - 1) / (kBlocks * kStreamTileRows);
  return tiles == 3 ? 4 : static_cast<int>(std::min<std::int64_t>(tiles, 5));
}
template <int kTiles>
std::size_t shared_bytes(std::int64_t num_tokens, std::int64_t hidden) {
  return sizeof(Shared<kTiles>) +
         static_cast<std::size_t>((kTiles * kStreamTileRows + num_tokens) * (hidden + kTokenPadding)) * sizeof(__half);
}
std::size_t shared_bytes(int tiles, std::int64_t num_tokens, std::int64_t hidden) {
  return tiles == 1   ? shared_bytes<1>(num_tokens, hidden)
         : tiles == 2 ? shared_bytes<2>(num_tokens, hidden)
                      : shared_bytes<4>(num_tokens, hidden);
}

template <class T, int kTiles>
void launch(ops::Stream stream, const Params<T>& params, int device_index) {
  const auto kernel = moe_route_kernel<T, kTiles>;
  allow_all_shared_memory(reinterpret_cast<const void*>(kernel), device_index);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  const DependentLaunch dependent{.grid = dim3(kBlocks),
                                  .block = dim3(kThreads),
                                  .stream = native(stream),
                                  .shared_bytes = shared_bytes<kTiles>(params.num_tokens, params.hidden),
                                  .cluster = kBlocks};
  dependent(kernel, params);
}

}  // namespace

bool moe_route_fits(TensorView x, const ops::Weight& router, std::int64_t num_experts) {
  const int tiles = tiles_per_block(num_experts);
  const auto is_aligned = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] % 8 == 0;
  };
  return is_hopper(x.device.index) && (x.dtype == DType::bf16 || x.dtype == DType::f16) &&
         router.view.dtype == x.dtype && x.shape[0] <= kMaxTokens && x.shape[1] % kLineColumns == 0 && tiles <= 4 &&
         is_aligned(x) && is_aligned(router.view) && router.view.is_contiguous() &&
         shared_bytes(tiles, x.shape[0], x.shape[1]) + kStaticBytes <= max_shared_bytes(x.device.index);
}

void moe_route(ops::Stream stream, TensorView x, const ops::FusedNorm& norm, const ops::Weight& router,
               std::int64_t num_experts, bool has_shared, bool renormalize, TensorView expert_ids, TensorView weights) {
  const auto k = static_cast<int>(expert_ids.shape[1]) - (has_shared ? 1 : 0);
  DELTAIC_CHECK(k <= kMaxExpertsPerToken, "moe_route on CUDA takes up to ", kMaxExpertsPerToken,
                " experts a token, not ", k);
  visit_half(x.dtype, [&]<class T>(T) {
    const Params<T> params{.x = static_cast<const T*>(x.data),
                           .x_stride = x.stride[0],
                           .norm_weight = static_cast<const float*>(norm.weight.data),
                           .eps = norm.eps,
                           .weight = static_cast<const T*>(router.view.data),
                           .has_shared = has_shared,
                           .renormalize = renormalize,
                           .num_tokens = static_cast<int>(x.shape[0]),
                           .hidden = static_cast<int>(x.shape[1]),
                           .num_experts = static_cast<int>(num_experts),
                           .k = k,
                           .expert_ids = static_cast<std::int32_t*>(expert_ids.data),
                           .weights = static_cast<float*>(weights.data)};
    switch (tiles_per_block(num_experts)) {
      case 1:
        return launch<T, 1>(stream, params, x.device.index);
      case 2:
        return launch<T, 2>(stream, params, x.device.index);
      default:
        return launch<T, 4>(stream, params, x.device.index);
    }
  });
}

}  // namespace deltaic::cuda

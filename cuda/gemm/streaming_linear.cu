// y = x W^T for 1 to 16 tokens: every weight is read once.
//   one block an SM, of small matrices one of this kernel and one of the next
//   the rows of W are shared out evenly, to the row; tile_stream.cuh says how a block goes through its rows
//   before the wait for the previous kernel a block asks for as many of its weights as fit beside the tokens
//   bound by memory: out_features x in_features x 2 bytes
#include "cuda/gemm/streaming_linear.h"

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

constexpr int kWarps = 8, kSplit = 4;
constexpr std::size_t kStaticBytes = 1024;  // shared memory of stage_tokens, rounded up

// A block of a small matrix leaves room for one of the next kernel, which copies its first weights while this one runs:
// the hand-over is most of its time. In large ones the longer ring is worth more.
constexpr std::size_t kSmallMatrixBytes = std::size_t{24} << 20, kPairBytes = 113 * 1024;
constexpr int kPairRing = 12, kShortPairRing = 10;
constexpr bool is_pair_ring(int ring) { return ring == kPairRing || ring == kShortPairRing; }

template <class T, class Y>
struct Params {
  const T* x;
  std::int64_t x_stride;
  const T* weight;
  const float* norm_weight;
  float eps;
  const float* bias;
  int num_tokens, in_features;
  std::int64_t num_outputs;  // columns of y
  Y* y;
  std::int64_t y_stride;
};

template <class T, class Y, bool kManyTokens, int kRing, bool kAccumulate, bool kSiluMul>
__global__ void __launch_bounds__(kWarps * 32, 1) streaming_linear_kernel(Params<T, Y> p) {
  using Tiles = TileStream<T, kWarps, kSplit, kManyTokens, kRing>;
  constexpr int kTileOutputs = kSiluMul ? kStreamTileRows / 2 : kStreamTileRows;
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tiles::Shared*>(shared_bytes);
  T* x = reinterpret_cast<T*>(shared_bytes + sizeof(shared));
  const int x_row = p.in_features + kTokenPadding;
  Y* residual = reinterpret_cast<Y*>(x + p.num_tokens * x_row);  // [num_tokens, num_outputs]

  const std::int64_t begin = p.num_outputs * blockIdx.x / gridDim.x;
  const int num_outputs = static_cast<int>(p.num_outputs * (blockIdx.x + 1) / gridDim.x - begin);
  const int group = threadIdx.x % 32 / 4;
  const auto rows = [&](int tile) -> const T* {  // with silu_mul 4 rows of the gate, then the same 4 of the up matrix
    const int output = tile * kTileOutputs + group % kTileOutputs;
    if (output >= num_outputs) return nullptr;
    const std::int64_t row = begin + output + (kSiluMul && group >= kTileOutputs ? p.num_outputs : 0);
    return p.weight + row * p.in_features;
  };
  Tiles tiles(shared, p.in_features, (num_outputs + kTileOutputs - 1) / kTileOutputs, rows);
  const NormFactors factors = NormFactors::first(p.norm_weight, p.in_features);
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto residual_of = [&](int i) { return __ldcg(p.y + i / num_outputs * p.y_stride + begin + i % num_outputs); };
  const int num_residuals = kAccumulate ? num_outputs * p.num_tokens : 0;
  Y first_residual{};
  if (static_cast<int>(threadIdx.x) < num_residuals) first_residual = residual_of(threadIdx.x);
  stage_tokens<T, kWarps>(p.x, p.x_stride, p.num_tokens, p.in_features, p.norm_weight, factors, p.eps, x, x_row);
  if (static_cast<int>(threadIdx.x) < num_residuals) residual[threadIdx.x] = first_residual;
  for (int i = threadIdx.x + kWarps * 32; i < num_residuals; i += kWarps * 32) residual[i] = residual_of(i);
  __syncthreads();

  const TokenFragment<T> fragment = token_fragment(x, x_row, p.num_tokens);
  tiles.run(
      rows, [&](int) { return fragment; },
      [&](int first, int count) {
        for (int i = threadIdx.x; i < count * kTileOutputs * p.num_tokens; i += kWarps * 32) {
          const int row = i % kTileOutputs, token = i / kTileOutputs % p.num_tokens,
                    tile = i / (kTileOutputs * p.num_tokens);
          const int output = (first + tile) * kTileOutputs + row;
          if (output >= num_outputs) continue;
          float value = tiles.sum(tile, token, row);
          if constexpr (kSiluMul) value = value / (1.0F + __expf(-value)) * tiles.sum(tile, token, row + kTileOutputs);
          if (p.bias != nullptr) value += p.bias[begin + output];
          if constexpr (kAccumulate) value += to_float(residual[token * num_outputs + output]);
          p.y[token * p.y_stride + begin + output] = from_float<Y>(value);
        }
      });
}

// Shared memory of a kernel, static memory included.
template <bool kManyTokens, int kRing>
std::size_t shared_bytes(const StreamingLinearArgs& args) {
  const std::int64_t num_tokens = args.x.shape[0], num_blocks = num_multiprocessors(args.x.device.index);
  const std::int64_t residual = args.accumulate ? num_tokens * (args.weight.out_features() / num_blocks + 1) : 0;
  return sizeof(typename TileStream<__half, kWarps, kSplit, kManyTokens, kRing>::Shared) + kStaticBytes +
         sizeof(__half) * static_cast<std::size_t>(num_tokens * (args.weight.in_features() + kTokenPadding) + residual);
}

template <class T, class Y, bool kManyTokens, int kRing>
void launch_streaming(ops::Stream stream, const StreamingLinearArgs& args) {
  const Params<T, Y> params{.x = static_cast<const T*>(args.x.data),
                            .x_stride = args.x.stride[0],
                            .weight = static_cast<const T*>(args.weight.view.data),
                            .norm_weight = static_cast<const float*>(args.norm_weight.data),
                            .eps = args.eps,
                            .bias = static_cast<const float*>(args.bias.data),
                            .num_tokens = static_cast<int>(args.x.shape[0]),
                            .in_features = static_cast<int>(args.weight.in_features()),
                            .num_outputs = args.weight.out_features() / (args.silu_mul ? 2 : 1),
                            .y = static_cast<Y*>(args.y.data),
                            .y_stride = args.y.stride[0]};
  const auto launch = [&](auto kernel) {
    const std::size_t alone = is_pair_ring(kRing) ? 0 : std::min(kOneBlockBytes, max_shared_bytes(args.x.device.index));
    allow_all_shared_memory(reinterpret_cast<const void*>(kernel), args.x.device.index);
    const auto num_blocks = std::min<std::int64_t>(params.num_outputs, num_multiprocessors(args.x.device.index));
    const DependentLaunch dependent{
        .grid = dim3(static_cast<unsigned>(num_blocks)),
        .block = dim3(kWarps * 32),
        .stream = native(stream),
        .shared_bytes = std::max(alone, shared_bytes<kManyTokens, kRing>(args)) - kStaticBytes};
    dependent(kernel, params);
  };
  if constexpr (std::is_same_v<Y, float>) {
    launch(streaming_linear_kernel<T, Y, kManyTokens, kRing, false, false>);
  } else if (args.silu_mul) {
    launch(streaming_linear_kernel<T, Y, kManyTokens, kRing, false, true>);
  } else if (args.accumulate) {
    launch(streaming_linear_kernel<T, Y, kManyTokens, kRing, true, false>);
  } else {
    launch(streaming_linear_kernel<T, Y, kManyTokens, kRing, false, false>);
  }
}

}  // namespace

bool can_stream_linear(const StreamingLinearArgs& args) {
  const auto& weight = args.weight.view;
  const std::int64_t num_tokens = args.x.shape[0];
  const std::size_t needed =
      num_tokens <= 8 ? shared_bytes<false, kShortRing>(args) : shared_bytes<true, kShortRing>(args);
  const bool aligned = args.x.stride[0] % 8 == 0 && reinterpret_cast<std::uintptr_t>(args.x.data) % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(weight.data) % 16 == 0;
  return (weight.dtype == DType::bf16 || weight.dtype == DType::f16) && args.x.dtype == weight.dtype &&
         (args.y.dtype == weight.dtype || (args.y.dtype == DType::f32 && !args.accumulate && !args.silu_mul)) &&
         num_tokens <= kMaxStreamingTokens && weight.is_contiguous() && aligned &&
         weight.shape[1] % kLineColumns == 0 && needed <= max_shared_bytes(args.x.device.index);
}

void streaming_linear(ops::Stream stream, const StreamingLinearArgs& args) {
  DELTAIC_CHECK(can_stream_linear(args), "streaming_linear: ", args.x.shape[0], " tokens, a weight of ",
                args.weight.out_features(), " x ", args.weight.in_features(), " ", name(args.weight.view.dtype));
  DELTAIC_CHECK(
      !args.silu_mul || (!args.accumulate && args.bias.data == nullptr && args.weight.out_features() % 2 == 0),
      "streaming_linear: silu_mul of ", args.weight.out_features(), " rows, with bias or accumulate");
  visit_half(args.x.dtype, [&]<class T>(T) {
    const auto launch = [&]<class Y>(Y) {
      if (args.x.shape[0] > 8) return launch_streaming<T, Y, true, kShortRing>(stream, args);
      const std::size_t most_bytes = max_shared_bytes(args.x.device.index);
      if (args.weight.view.num_bytes() <= kSmallMatrixBytes) {
        const std::size_t pair_bytes = std::min(kPairBytes, most_bytes);
        if (shared_bytes<false, kPairRing>(args) <= pair_bytes)
          return launch_streaming<T, Y, false, kPairRing>(stream, args);
        if (shared_bytes<false, kShortPairRing>(args) <= pair_bytes)
          return launch_streaming<T, Y, false, kShortPairRing>(stream, args);
      }
      shared_bytes<false, kLongRing>(args) <= most_bytes ? launch_streaming<T, Y, false, kLongRing>(stream, args)
                                                         : launch_streaming<T, Y, false, kShortRing>(stream, args);
    };
    args.y.dtype == DType::f32 ? launch(float{}) : launch(T{});
  });
}

}  // namespace deltaic::cuda

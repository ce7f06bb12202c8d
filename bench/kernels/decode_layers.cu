// Times the kernels of a GDN layer of Qwen3.5-35B-A3B one after another, as a decode step runs them: layers of their
// own weights in one graph, so that hand-overs between kernels count. What they compute is checked by the tests.
//   bench_decode_layers [TOKENS ...]: us a layer; share of the bytes that must move at 4.18 TB/s
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/moe.h"
#include "cuda/check.h"
#include "cuda/ops/gdn_decode.h"

using namespace deltaic;
using T = __nv_bfloat16;

namespace {

constexpr int kLayers = 6, kHidden = 2048, kIntermediate = 512, kExperts = 256, kTopK = 8;
constexpr int kKeyHeads = 16, kValueHeads = 32, kDim = 128, kTaps = 4;
constexpr int kConvDim = 2 * kKeyHeads * kDim + kValueHeads * kDim, kInner = kValueHeads * kDim;
constexpr int kRow = kConvDim + kInner + 2 * kValueHeads;
const Device kDevice{DeviceType::cuda, 0};

template <class U>
__global__ void fill_kernel(U* data, std::size_t count, unsigned seed, float scale, float offset) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    unsigned h = (static_cast<unsigned>(i) + seed * 0x9e3779b9U) * 2654435761U;
    h ^= h >> 15, h *= 2246822519U, h ^= h >> 13;
    data[i] = static_cast<U>((static_cast<float>(h & 0xFFFFU) / 32768.0F - 1.0F) * scale + offset);
  }
}

// Random values of [-scale, scale) + offset.
TensorView tensor(DType dtype, std::vector<std::int64_t> shape, float scale, float offset = 0.0F) {
  static unsigned seed = 0;
  std::size_t count = 1;
  for (const auto size : shape) count *= static_cast<std::size_t>(size);
  void* data = nullptr;
  cuda::check(cudaMalloc(&data, count * size_of(dtype)));
  ++seed;
  if (dtype == DType::bf16)
    fill_kernel<<<1024, 256>>>(static_cast<T*>(data), count, seed, scale, offset);
  else if (dtype == DType::f32)
    fill_kernel<<<1024, 256>>>(static_cast<float*>(data), count, seed, scale, offset);
  else
    cuda::check(cudaMemset(data, 0, count * size_of(dtype)));
  cuda::check(cudaGetLastError());
  switch (shape.size()) {
    case 1:
      return make_view(data, dtype, {shape[0]}, kDevice);
    case 2:
      return make_view(data, dtype, {shape[0], shape[1]}, kDevice);
    case 3:
      return make_view(data, dtype, {shape[0], shape[1], shape[2]}, kDevice);
    default:
      return make_view(data, dtype, {shape[0], shape[1], shape[2], shape[3]}, kDevice);
  }
}

struct Layer {
  TensorView norm = tensor(DType::f32, {kHidden}, 0.1F, 1.0F), moe_norm = tensor(DType::f32, {kHidden}, 0.1F, 1.0F);
  TensorView in_proj = tensor(DType::bf16, {kRow, kHidden}, 0.05F),
             out_proj = tensor(DType::bf16, {kHidden, kInner}, 0.02F);
  TensorView conv = tensor(DType::f32, {kConvDim, kTaps}, 0.5F), A_log = tensor(DType::f32, {kValueHeads}, 1.0F);
  TensorView dt_bias = tensor(DType::f32, {kValueHeads}, 1.0F), gated_norm = tensor(DType::f32, {kDim}, 0.1F, 1.0F);
  TensorView router = tensor(DType::bf16, {kExperts + 1, kHidden}, 0.05F);  // and the shared expert's gate
  ops::ExpertWeights experts{
      // the shared one last
      .gate = {},
      .up = {},
      .down = {},
      .all_gate_up = {tensor(DType::bf16, {kExperts + 1, 2 * kIntermediate, kHidden}, 0.05F), nullptr},
      .all_down = {tensor(DType::bf16, {kExperts + 1, kHidden, kIntermediate}, 0.02F), nullptr}};
  TensorView conv_state, temporal;
};

double median_us(cudaStream_t stream, const std::function<void()>& enqueue) {
  return time_in_graph(stream, 4, [&](int) { enqueue(); }).median_us;
}

enum Part { kIn = 1, kMixer = 2, kOut = 4, kRouter = 8, kExpertsPart = 16, kFusedRouter = 32, kAll = 63 };

void run(cudaStream_t stream, std::vector<Layer>& layers, int m) {
  TensorView x = tensor(DType::bf16, {m, kHidden}, 1.0F), proj = tensor(DType::bf16, {m, kRow}, 1.0F);
  TensorView mixed = tensor(DType::bf16, {m, kValueHeads, kDim}, 1.0F),
             logits = tensor(DType::f32, {m, kExperts + 1}, 1.0F);
  TensorView ids = tensor(DType::i32, {m, kTopK + 1}, 0.0F), weights = tensor(DType::f32, {m, kTopK + 1}, 0.0F);
  TensorView slots = tensor(DType::i32, {m}, 0.0F), initial = tensor(DType::u8, {m}, 0.0F);
  std::vector<std::int32_t> slot_numbers(static_cast<std::size_t>(m));
  for (int i = 0; i < m; ++i) slot_numbers[static_cast<std::size_t>(i)] = i;
  cuda::check(cudaMemcpy(slots.data, slot_numbers.data(), slot_numbers.size() * 4, cudaMemcpyHostToDevice));
  cuda::check(cudaMemset(initial.data, 1, static_cast<std::size_t>(m)));
  for (Layer& layer : layers) {
    layer.conv_state = tensor(DType::bf16, {m, kConvDim, kTaps - 1}, 1.0F);
    layer.temporal = tensor(DType::f32, {m, kValueHeads, kDim, kDim}, 0.1F);
  }
  const ops::GdnShape shape{kKeyHeads, kValueHeads, kDim, kDim, kTaps};
  const TensorView workspace =
      tensor(DType::u8, {static_cast<std::int64_t>(cuda::gdn_decode_workspace_bytes(shape, m))}, 0.0F);
  const TensorView scratch = tensor(
      DType::u8,
      {static_cast<std::int64_t>(cuda::moe_scratch_bytes(m, kTopK + 1, kExperts + 1, kHidden, kIntermediate))}, 0.0F);
  const ops::Context ctx{.device = kDevice, .stream = {stream}};
  TensorView expert_logits = logits, shared_logits = logits;
  expert_logits.shape[1] = kExperts;
  shared_logits.data = static_cast<float*>(logits.data) + kExperts;
  shared_logits.shape[1] = 1;

  const auto enqueue = [&](int parts) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      TensorView inner = mixed;
      inner.rank = 2, inner.shape[1] = kInner, inner.stride[0] = kInner, inner.stride[1] = 1;
      const ops::FusedNorm norm{.weight = layer.norm, .eps = 1e-6F}, moe_norm{.weight = layer.moe_norm, .eps = 1e-6F};
      if (parts & kIn) ops::linear(ctx, x, {layer.in_proj, nullptr}, {.bias = {}, .norm = norm}, proj);
      if (parts & kMixer)
        cuda::gdn_decode({stream}, {.shape = shape,
                                    .layout = {.q = 0,
                                               .q_stride = kDim,
                                               .k = kKeyHeads * kDim,
                                               .k_stride = kDim,
                                               .v = 2 * kKeyHeads * kDim,
                                               .v_group_stride = 2 * kDim,
                                               .z = kConvDim,
                                               .z_group_stride = 2 * kDim,
                                               .b = kConvDim + kInner,
                                               .b_group_stride = 2,
                                               .a = kConvDim + kInner + kValueHeads,
                                               .a_group_stride = 2},
                                    .proj = proj,
                                    .conv_weight = layer.conv,
                                    .A_log = layer.A_log,
                                    .dt_bias = layer.dt_bias,
                                    .norm_weight = layer.gated_norm,
                                    .state_indices = slots,
                                    .has_initial_state = initial,
                                    .conv_state = layer.conv_state,
                                    .temporal = layer.temporal,
                                    .workspace = workspace,
                                    .out = mixed});
      if (parts & kOut) ops::linear(ctx, inner, {layer.out_proj, nullptr}, {.bias = {}, .accumulate = true}, x);
      const ops::Weight router{layer.router, nullptr};
      if ((parts & kRouter) && (parts & kFusedRouter)) {
        ops::moe_route(ctx, x, moe_norm, router, kExperts, true, true, ids, weights);
      } else if (parts & kRouter) {
        ops::linear(ctx, x, router, {.bias = {}, .norm = moe_norm}, logits);
        ops::moe_router(ctx, expert_logits, shared_logits, true, ids, weights);
      }
      if (parts & kExpertsPart) ops::moe_experts(ctx, x, layer.experts, ids, weights, scratch, x, moe_norm);
    }
  };
  cuda::check(cudaDeviceSynchronize());
  enqueue(kAll);
  cuda::check(cudaStreamSynchronize(stream));
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(m) * (kTopK + 1));
  cuda::check(cudaMemcpy(chosen.data(), ids.data, chosen.size() * 4, cudaMemcpyDeviceToHost));
  std::vector<T> row(static_cast<std::size_t>(m) * kHidden);
  cuda::check(cudaMemcpy(row.data(), x.data, row.size() * 2, cudaMemcpyDeviceToHost));
  double largest = 0.0;
  for (const T value : row)
    largest = std::max(largest, std::isfinite(static_cast<float>(value))
                                    ? std::abs(static_cast<double>(static_cast<float>(value)))
                                    : 1e30);
  const auto distinct = static_cast<double>(std::set<std::int32_t>(chosen.begin(), chosen.end()).size());
  const double in = 2.0 * kRow * kHidden, out = 2.0 * kHidden * kInner, router = 2.0 * (kExperts + 1) * kHidden;
  const double experts = distinct * 6.0 * kHidden * kIntermediate, state = m * (8.0 * kInner * kDim + 12.0 * kConvDim);
  const double bound = (in + out + router + experts + state) / 4.18e6;
  const double all = median_us(stream, [&] { enqueue(kAll); }) / kLayers;
  std::printf(
      "%2d tokens  layer %7.2f us  bound %6.2f  %5.1f %%   in..out %6.2f (%.2f)  router %5.2f (apart %.2f)  experts "
      "%6.2f (%.2f), %g distinct, |x| <= %.3g\n",
      m, all, bound, bound / all * 100, median_us(stream, [&] { enqueue(kIn | kMixer | kOut); }) / kLayers,
      (in + out + state) / 4.18e6, median_us(stream, [&] { enqueue(kRouter | kFusedRouter); }) / kLayers,
      median_us(stream, [&] { enqueue(kRouter); }) / kLayers,
      median_us(stream, [&] { enqueue(kExpertsPart); }) / kLayers, experts / 4.18e6, distinct, largest);
  for (Layer& layer : layers) cudaFree(layer.conv_state.data), cudaFree(layer.temporal.data);
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreate(&stream));
  std::vector<Layer> layers(kLayers);
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {1, 2, 4, 8, 16};
  for (const int m : sizes) run(stream, layers, m);
  return 0;
}

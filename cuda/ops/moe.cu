// The MoE ops: the router's choice, the experts by the kernel that fits, and the shared expert's sum.
//   moe_router: a warp a token; bound by latency     add_sigmoid_scaled: bound by memory, 3 rows a token
#include "cpp/src/ops/moe.h"

#include <algorithm>

#include "cpp/src/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/gemm/moe_grouped.h"
#include "cuda/gemm/moe_streaming.h"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/moe_plain.h"
#include "cuda/ops/top_experts.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kRouterWarps = 4;
constexpr int kThreads = 256;

__global__ void __launch_bounds__(kRouterWarps * 32)
    moe_router_kernel(const float* logits, std::int64_t stride, const float* shared_logits, std::int64_t shared_stride,
                      int num_tokens, int num_experts, int k, bool renormalize, std::int32_t* expert_ids,
                      float* weights) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = std::int64_t{blockIdx.x} * kRouterWarps + threadIdx.x / 32;
  if (token >= num_tokens) return;
  const int num_columns = k + (shared_logits != nullptr ? 1 : 0);
  expert_ids += token * num_columns, weights += token * num_columns;
  if (shared_logits != nullptr && threadIdx.x % 32 == 0) {
    expert_ids[k] = num_experts;
    weights[k] = 1.0F / (1.0F + expf(-__ldcg(shared_logits + token * shared_stride)));
  }
  logits += token * stride;
  top_experts([&](int expert) { return __ldcg(logits + expert); }, num_experts, k, renormalize,
              [&](int j, int id, float weight) {
                expert_ids[j] = id;
                weights[j] = weight;
              });
}

template <class Gate, class T>
__global__ void __launch_bounds__(kThreads)
    add_sigmoid_scaled_kernel(const Gate* gate, std::int64_t gate_stride, const T* x, std::int64_t x_stride,
                              std::int64_t size, T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  const float factor = 1.0F / (1.0F + expf(-to_float(gate[token * gate_stride])));
  x += token * x_stride, y += token * y_stride;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads)
    y[i] = from_float<T>(to_float(y[i]) + factor * to_float(x[i]));
}

}  // namespace

void moe_router(ops::Stream stream, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights) {
  const auto num_tokens = static_cast<int>(logits.shape[0]), num_experts = static_cast<int>(logits.shape[1]);
  const auto k = static_cast<int>(expert_ids.shape[1]) - (shared_logits.data != nullptr ? 1 : 0);
  DELTAIC_CHECK(num_experts <= kMaxExperts && k <= kMaxExpertsPerToken, "moe_router on CUDA takes up to ", kMaxExperts,
                " experts and ", kMaxExpertsPerToken, " a token, not ", num_experts, " and ", k);
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((num_tokens + kRouterWarps - 1) / kRouterWarps)),
                               .block = dim3(kRouterWarps * 32),
                               .stream = native(stream)};
  launch(moe_router_kernel, static_cast<const float*>(logits.data), logits.stride[0],
         static_cast<const float*>(shared_logits.data), shared_logits.stride[0], num_tokens, num_experts, k,
         renormalize, static_cast<std::int32_t*>(expert_ids.data), static_cast<float*>(weights.data));
}

std::size_t moe_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t num_experts,
                              std::int64_t hidden, std::int64_t intermediate) {
  const auto plain = static_cast<std::size_t>(num_tokens * num_experts_per_token * intermediate) * sizeof(float);
  return std::max({plain, moe_streaming_scratch_bytes(num_tokens, num_experts_per_token, intermediate),
                   moe_grouped_scratch_bytes(num_tokens, num_experts_per_token, num_experts, hidden, intermediate)});
}

bool moe_experts_fuses_norm(TensorView x, TensorView gate_up, TensorView down, std::int64_t num_experts_per_token) {
  MoeStreamingArgs args{};
  args.x = x, args.gate_up = gate_up, args.down = down;
  args.expert_ids.shape = {x.shape[0], num_experts_per_token};
  return can_stream_moe(args);
}

void moe_experts(ops::Stream stream, TensorView x, const ops::FusedNorm& norm, TensorView gate_up, TensorView down,
                 TensorView expert_ids, TensorView weights, TensorView scratch, TensorView y) {
  const MoeStreamingArgs few{.x = x,
                             .norm_weight = norm.weight,
                             .eps = norm.eps,
                             .gate_up = gate_up,
                             .down = down,
                             .expert_ids = expert_ids,
                             .weights = weights,
                             .shared_gate_up = {},
                             .shared_down = {},
                             .shared_logits = {},
                             .scratch = scratch,
                             .y = y};
  if (can_stream_moe(few)) return moe_streaming(stream, few);
  const MoeGroupedArgs many{.x = x,
                            .gate_up = gate_up,
                            .down = down,
                            .expert_ids = expert_ids,
                            .weights = weights,
                            .scratch = scratch,
                            .y = y};
  if (can_group_moe(many)) return moe_grouped(stream, many);
  moe_plain(stream, x, gate_up, down, expert_ids, weights, scratch, y);
}

void add_sigmoid_scaled(ops::Stream stream, TensorView gate, TensorView x, TensorView y) {
  visit_float(x.dtype, [&]<class T>(T) {
    const DependentLaunch launch{
        .grid = dim3(static_cast<unsigned>(x.shape[0])), .block = dim3(kThreads), .stream = native(stream)};
    const auto run = [&]<class Gate>(Gate) {
      launch(add_sigmoid_scaled_kernel<Gate, T>, static_cast<const Gate*>(gate.data), gate.stride[0],
             static_cast<const T*>(x.data), x.stride[0], x.shape[1], static_cast<T*>(y.data), y.stride[0]);
    };
    gate.dtype == DType::f32 ? run(float{}) : run(T{});
  });
}

}  // namespace deltaic::cuda

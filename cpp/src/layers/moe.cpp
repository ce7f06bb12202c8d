#include "cpp/src/layers/moe.h"

#include "cpp/src/ops/linear.h"

namespace deltaic {

Moe::Buffers Moe::take_buffers(Workspace& workspace, std::int64_t num_tokens) const {
  const std::int64_t hidden_size = router.in_features();
  const auto scratch_bytes =
      ops::moe_scratch_bytes(num_tokens, num_experts_per_token, hidden_size, experts.gate.front().out_features());
  Buffers buffers{.router_logits = workspace.take(DType::f32, {num_tokens, router.out_features()}),
                  .expert_ids = workspace.take(DType::i32, {num_tokens, num_experts_per_token}),
                  .expert_weights = workspace.take(DType::f32, {num_tokens, num_experts_per_token}),
                  .expert_scratch = workspace.take(DType::u8, {static_cast<std::int64_t>(scratch_bytes)}),
                  .shared_expert = {},
                  .shared_gate = {},
                  .shared_out = {}};
  if (shared_expert) {
    buffers.shared_expert = shared_expert->take_buffers(workspace, num_tokens);
    buffers.shared_gate = workspace.take(DType::f32, {num_tokens, 1});
    buffers.shared_out = workspace.take(DType::f32, {num_tokens, hidden_size});
  }
  return buffers;
}

void Moe::forward(const ops::Context& ctx, TensorView x, Workspace& workspace, TensorView y) const {
  const Buffers buffers = take_buffers(workspace, x.shape[0]);
  ops::linear(ctx, x, router, buffers.router_logits);
  ops::moe_router(ctx, buffers.router_logits, renormalize, buffers.expert_ids, buffers.expert_weights);
  ops::moe_experts(ctx, x, experts, buffers.expert_ids, buffers.expert_weights, buffers.expert_scratch, y);
  if (!shared_expert) return;
  ops::linear(ctx, x, shared_expert_gate, buffers.shared_gate);
  shared_expert->forward(ctx, x, buffers.shared_expert, /*accumulate=*/false, buffers.shared_out);
  ops::add_sigmoid_scaled(ctx, buffers.shared_gate, buffers.shared_out, y);
}

}  // namespace deltaic

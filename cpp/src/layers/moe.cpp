#include "cpp/src/layers/moe.h"

#include "cpp/src/ops/linear.h"

namespace deltaic {

Moe::Buffers Moe::take_buffers(Workspace& workspace, const StepShape& shape) const {
  const std::int64_t hidden_size = router.parts[0].weight.in_features(), num_tokens = shape.num_tokens;
  const int num_shared = is_shared_among_experts() ? 1 : 0, k = num_experts_per_token + num_shared;
  const auto scratch_bytes =
      ops::moe_scratch_bytes(shape.device, num_tokens, k, num_experts + num_shared, hidden_size, intermediate_size);
  Buffers buffers{.router_logits = workspace.take(DType::f32, {num_tokens, router.row_size}),
                  .expert_ids = workspace.take(DType::i32, {num_tokens, k}),
                  .expert_weights = workspace.take(DType::f32, {num_tokens, k}),
                  .expert_scratch = workspace.take(DType::u8, {static_cast<std::int64_t>(scratch_bytes)}),
                  .shared_expert = {},
                  .shared_out = {}};
  if (shared_expert) {
    buffers.shared_expert = shared_expert->take_buffers(workspace, shape);
    buffers.shared_out = workspace.take(shape.dtype, {num_tokens, hidden_size});
  }
  return buffers;
}

void Moe::forward(const ops::Context& ctx, LayerInput& input, const StepShape& shape, Workspace& workspace,
                  TensorView y) const {
  const Buffers buffers = take_buffers(workspace, shape);
  // Before the router: moe_experts reads its tokens while the kernel before it runs.
  const bool experts_norm =
      !shared_expert && ops::moe_experts_fuses_norm(ctx, input.x(), experts, buffers.expert_ids.shape[1]);
  if (!experts_norm) input.normed(ctx);

  const TensorView shared_logits = has_shared_expert ? columns(buffers.router_logits, num_experts, 1) : TensorView{};
  if (!shared_expert && router.parts.size() == 1 &&
      ops::moe_route_fits(ctx, input.x(), router.parts[0].weight, num_experts)) {
    ops::moe_route(ctx, input.x(), input.norm(), router.parts[0].weight, num_experts, has_shared_expert, renormalize,
                   buffers.expert_ids, buffers.expert_weights);
  } else {
    router.forward(ctx, input, buffers.router_logits);
    ops::moe_router(ctx, columns(buffers.router_logits, 0, num_experts),
                    is_shared_among_experts() ? shared_logits : TensorView{}, renormalize, buffers.expert_ids,
                    buffers.expert_weights);
  }
  ops::moe_experts(ctx, experts_norm ? input.x() : input.normed(ctx), experts, buffers.expert_ids,
                   buffers.expert_weights, buffers.expert_scratch, y, experts_norm ? input.norm() : ops::FusedNorm{});
  if (!shared_expert) return;
  shared_expert->forward(ctx, input, buffers.shared_expert, /*accumulate=*/false, buffers.shared_out);
  ops::add_sigmoid_scaled(ctx, shared_logits, buffers.shared_out, y);
}

}  // namespace deltaic

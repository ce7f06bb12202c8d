#include "cpp/src/ops/moe.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void moe_router(const Context& ctx, TensorView logits, bool renormalize, TensorView expert_ids, TensorView weights) {
  const char* op = "moe_router";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "logits", logits, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_contiguous(op, "expert_ids", expert_ids, ctx, {DType::i32}, {logits.shape[0], kAnySize});
  check_contiguous(op, "weights", weights, ctx, {DType::f32}, {logits.shape[0], expert_ids.shape[1]});
  DELTAIC_CHECK(0 < expert_ids.shape[1] && expert_ids.shape[1] <= logits.shape[1], op, ": ", expert_ids.shape[1],
                " experts a token of ", logits.shape[1]);
  if (logits.shape[0] == 0) return;
  cpu::moe_router(threads_of(op, ctx), logits, renormalize, expert_ids, weights);
}

std::size_t moe_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t hidden,
                              std::int64_t intermediate) {
  const auto num_rows = static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(num_experts_per_token);
  return num_rows * static_cast<std::size_t>(2 * intermediate + hidden) * sizeof(float);
}

void moe_experts(const Context& ctx, TensorView x, const ExpertWeights& experts, TensorView expert_ids,
                 TensorView weights, TensorView scratch, TensorView y) {
  const char* op = "moe_experts";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "x", x, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_tensor(op, "y", y, ctx, {DType::f32}, {x.shape[0], x.shape[1]});
  check_contiguous(op, "expert_ids", expert_ids, ctx, {DType::i32}, {x.shape[0], kAnySize});
  check_contiguous(op, "weights", weights, ctx, {DType::f32}, {x.shape[0], expert_ids.shape[1]});
  DELTAIC_CHECK(
      !experts.gate.empty() && experts.gate.size() == experts.up.size() && experts.gate.size() == experts.down.size(),
      op, ": ", experts.gate.size(), " gate, ", experts.up.size(), " up and ", experts.down.size(),
      " down projections; there must be as many of each");
  const std::int64_t hidden = x.shape[1], intermediate = experts.gate[0].out_features();
  for (std::size_t e = 0; e < experts.gate.size(); ++e) {
    check_tensor(op, "gate", experts.gate[e].view, ctx, {DType::f32, DType::f16, DType::bf16}, {intermediate, hidden});
    check_tensor(op, "up", experts.up[e].view, ctx, {DType::f32, DType::f16, DType::bf16}, {intermediate, hidden});
    check_tensor(op, "down", experts.down[e].view, ctx, {DType::f32, DType::f16, DType::bf16}, {hidden, intermediate});
  }
  const std::size_t needed = moe_scratch_bytes(x.shape[0], static_cast<int>(expert_ids.shape[1]), hidden, intermediate);
  DELTAIC_CHECK(scratch.is_contiguous() && scratch.num_bytes() >= needed, op, ": scratch has ", scratch.num_bytes(),
                " bytes, ", needed, " are needed");
  if (y.numel() == 0 || expert_ids.shape[1] == 0) return;
  cpu::moe_experts(threads_of(op, ctx), x, experts, expert_ids, weights, scratch, y);
}

void add_sigmoid_scaled(const Context& ctx, TensorView gate, TensorView x, TensorView y) {
  const char* op = "add_sigmoid_scaled";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "x", x, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_tensor(op, "gate", gate, ctx, {DType::f32}, {x.shape[0], 1});
  check_tensor(op, "y", y, ctx, {DType::f32}, {x.shape[0], x.shape[1]});
  if (y.numel() == 0) return;
  cpu::add_sigmoid_scaled(threads_of(op, ctx), gate, x, y);
}

}  // namespace deltaic::ops

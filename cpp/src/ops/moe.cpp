#include "cpp/src/ops/moe.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void moe_router(const Context& ctx, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights) {
  const char* op = "moe_router";
  check_tensor(op, "logits", logits, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_contiguous(op, "expert_ids", expert_ids, ctx, {DType::i32}, {logits.shape[0], kAnySize});
  check_contiguous(op, "weights", weights, ctx, {DType::f32}, {logits.shape[0], expert_ids.shape[1]});
  const bool has_shared = shared_logits.data != nullptr;
  if (has_shared) check_tensor(op, "shared_logits", shared_logits, ctx, {DType::f32}, {logits.shape[0], 1});
  const std::int64_t k = expert_ids.shape[1] - (has_shared ? 1 : 0);
  DELTAIC_CHECK(0 < k && k <= logits.shape[1], op, ": ", k, " experts a token of ", logits.shape[1]);
  if (logits.shape[0] == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::moe_router(threads_of(op, ctx), logits, shared_logits, renormalize, expert_ids, weights);
    case DeviceType::cuda:
      return cuda::moe_router(ctx.stream, logits, shared_logits, renormalize, expert_ids, weights);
  }
}

std::size_t moe_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t hidden,
                              std::int64_t intermediate) {
  const auto num_rows = static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(num_experts_per_token);
  return num_rows * static_cast<std::size_t>(2 * intermediate + hidden) * sizeof(float);
}

std::size_t moe_scratch_bytes(Device device, std::int64_t num_tokens, int num_experts_per_token,
                              std::int64_t num_experts, std::int64_t hidden, std::int64_t intermediate) {
  return device.type == DeviceType::cpu
             ? moe_scratch_bytes(num_tokens, num_experts_per_token, hidden, intermediate)
             : cuda::moe_scratch_bytes(num_tokens, num_experts_per_token, num_experts, hidden, intermediate);
}

namespace {

void check_scratch(const char* op, const TensorView& scratch, std::size_t needed) {
  DELTAIC_CHECK(scratch.is_contiguous() && scratch.num_bytes() >= needed, op, ": scratch has ", scratch.num_bytes(),
                " bytes, ", needed, " are needed");
}

void cuda_moe_experts(const char* op, const Context& ctx, TensorView x, const ExpertWeights& experts,
                      TensorView expert_ids, TensorView weights, TensorView scratch, TensorView y,
                      const FusedNorm& norm) {
  const TensorView &gate_up = experts.all_gate_up.view, &down = experts.all_down.view;
  DELTAIC_CHECK(gate_up.rank == 3 && gate_up.shape[1] % 2 == 0, op, ": all_gate_up must be [num_experts, 2 * ",
                "intermediate, hidden], has rank ", gate_up.rank);
  const std::int64_t num_experts = gate_up.shape[0], intermediate = gate_up.shape[1] / 2;
  check_contiguous(op, "all_gate_up", gate_up, ctx, {x.dtype}, {num_experts, 2 * intermediate, x.shape[1]});
  check_contiguous(op, "all_down", down, ctx, {x.dtype}, {num_experts, x.shape[1], intermediate});
  check_scratch(op, scratch,
                cuda::moe_scratch_bytes(x.shape[0], static_cast<int>(expert_ids.shape[1]), num_experts, x.shape[1],
                                        intermediate));
  if (y.numel() == 0 || expert_ids.shape[1] == 0) return;
  cuda::moe_experts(ctx.stream, x, norm, gate_up, down, expert_ids, weights, scratch, y);
}

}  // namespace

bool moe_route_fits(const Context& ctx, TensorView x, const Weight& router, std::int64_t num_experts) {
  return ctx.device.type == DeviceType::cuda && cuda::moe_route_fits(x, router, num_experts);
}

void moe_route(const Context& ctx, TensorView x, const FusedNorm& norm, const Weight& router, std::int64_t num_experts,
               bool has_shared_expert, bool renormalize, TensorView expert_ids, TensorView weights) {
  const char* op = "moe_route";
  check_tensor(op, "x", x, ctx, float_types(ctx), {kAnySize, kAnySize});
  check_contiguous(op, "expert_ids", expert_ids, ctx, {DType::i32}, {x.shape[0], kAnySize});
  check_contiguous(op, "weights", weights, ctx, {DType::f32}, {x.shape[0], expert_ids.shape[1]});
  if (norm.is_set()) check_contiguous(op, "norm", norm.weight, ctx, {DType::f32}, {x.shape[1]});
  const std::int64_t num_shared = has_shared_expert ? 1 : 0, k = expert_ids.shape[1] - num_shared;
  DELTAIC_CHECK(router.out_features() >= num_experts + num_shared, op, ": a router of ", router.out_features(),
                " rows for ", num_experts, " experts", has_shared_expert ? " and a shared one" : "");
  DELTAIC_CHECK(0 < k && k <= num_experts, op, ": ", k, " experts a token of ", num_experts);
  DELTAIC_CHECK(moe_route_fits(ctx, x, router, num_experts), op, ": ", x.shape[0], " tokens of ", name(x.dtype),
                " do not fit one kernel");
  if (x.numel() == 0) return;
  cuda::moe_route(ctx.stream, x, norm, router, num_experts, has_shared_expert, renormalize, expert_ids, weights);
}

bool moe_experts_fuses_norm(const Context& ctx, TensorView x, const ExpertWeights& experts,
                            std::int64_t num_experts_per_token) {
  return ctx.device.type == DeviceType::cuda &&
         cuda::moe_experts_fuses_norm(x, experts.all_gate_up.view, experts.all_down.view, num_experts_per_token);
}

void moe_experts(const Context& ctx, TensorView x, const ExpertWeights& experts, TensorView expert_ids,
                 TensorView weights, TensorView scratch, TensorView y, const FusedNorm& norm) {
  const char* op = "moe_experts";
  check_tensor(op, "x", x, ctx, float_types(ctx), {kAnySize, kAnySize});
  check_tensor(op, "y", y, ctx, {x.dtype}, {x.shape[0], x.shape[1]});
  check_contiguous(op, "expert_ids", expert_ids, ctx, {DType::i32}, {x.shape[0], kAnySize});
  check_contiguous(op, "weights", weights, ctx, {DType::f32}, {x.shape[0], expert_ids.shape[1]});
  if (norm.is_set()) check_contiguous(op, "norm", norm.weight, ctx, {DType::f32}, {x.shape[1]});
  DELTAIC_CHECK(!norm.is_set() || moe_experts_fuses_norm(ctx, x, experts, expert_ids.shape[1]), op, ": ", x.shape[0],
                " tokens of ", name(x.dtype), " take no norm");
  if (ctx.device.type == DeviceType::cuda)
    return cuda_moe_experts(op, ctx, x, experts, expert_ids, weights, scratch, y, norm);
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
  check_scratch(op, scratch,
                moe_scratch_bytes(x.shape[0], static_cast<int>(expert_ids.shape[1]), hidden, intermediate));
  if (y.numel() == 0 || expert_ids.shape[1] == 0) return;
  cpu::moe_experts(threads_of(op, ctx), x, experts, expert_ids, weights, scratch, y);
}

void add_sigmoid_scaled(const Context& ctx, TensorView gate, TensorView x, TensorView y) {
  const char* op = "add_sigmoid_scaled";
  check_tensor(op, "x", x, ctx, float_types(ctx), {kAnySize, kAnySize});
  check_tensor(op, "gate", gate, ctx, {DType::f32, x.dtype}, {x.shape[0], 1});
  check_tensor(op, "y", y, ctx, {x.dtype}, {x.shape[0], x.shape[1]});
  if (y.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::add_sigmoid_scaled(threads_of(op, ctx), gate, x, y);
    case DeviceType::cuda:
      return cuda::add_sigmoid_scaled(ctx.stream, gate, x, y);
  }
}

}  // namespace deltaic::ops

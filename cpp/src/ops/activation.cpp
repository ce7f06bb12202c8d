#include "cpp/src/ops/activation.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void silu_mul(const Context& ctx, TensorView gate, TensorView up, TensorView y) {
  const char* op = "silu_mul";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "gate", gate, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_tensor(op, "up", up, ctx, {DType::f32}, {gate.shape[0], gate.shape[1]});
  check_tensor(op, "y", y, ctx, {DType::f32}, {gate.shape[0], gate.shape[1]});
  if (gate.numel() == 0) return;
  cpu::silu_mul(threads_of(op, ctx), gate, up, y);
}

void sigmoid_mul(const Context& ctx, TensorView gate, TensorView x) {
  const char* op = "sigmoid_mul";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_contiguous(op, "x", x, ctx, {DType::f32}, {kAnySize, kAnySize, kAnySize});
  check_tensor(op, "gate", gate, ctx, {DType::f32}, {x.shape[0], x.shape[1], x.shape[2]});
  if (x.numel() == 0) return;
  cpu::sigmoid_mul(threads_of(op, ctx), gate, x);
}

}  // namespace deltaic::ops

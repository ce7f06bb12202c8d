#include "cpp/src/ops/activation.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void silu_mul(const Context& ctx, TensorView gate, TensorView up, TensorView y) {
  const char* op = "silu_mul";
  check_tensor(op, "gate", gate, ctx, float_types(ctx), {kAnySize, kAnySize});
  check_tensor(op, "up", up, ctx, {gate.dtype}, {gate.shape[0], gate.shape[1]});
  check_tensor(op, "y", y, ctx, {gate.dtype}, {gate.shape[0], gate.shape[1]});
  if (gate.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::silu_mul(threads_of(op, ctx), gate, up, y);
    case DeviceType::cuda:
      return cuda::silu_mul(ctx.stream, gate, up, y);
  }
}

void sigmoid_mul(const Context& ctx, TensorView gate, TensorView x) {
  const char* op = "sigmoid_mul";
  check_contiguous(op, "x", x, ctx, float_types(ctx), {kAnySize, kAnySize, kAnySize});
  check_tensor(op, "gate", gate, ctx, {x.dtype}, {x.shape[0], x.shape[1], x.shape[2]});
  if (x.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::sigmoid_mul(threads_of(op, ctx), gate, x);
    case DeviceType::cuda:
      return cuda::sigmoid_mul(ctx.stream, gate, x);
  }
}

}  // namespace deltaic::ops

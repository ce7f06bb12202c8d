#include "cpp/src/ops/linear.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void linear(const Context& ctx, TensorView x, const Weight& weight, const LinearOptions& options, TensorView y) {
  const char* op = "linear";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "x", x, ctx, {DType::f32}, {kAnySize, kAnySize});
  check_tensor(op, "weight", weight.view, ctx, {DType::f32, DType::f16, DType::bf16}, {kAnySize, x.shape[1]});
  check_tensor(op, "y", y, ctx, {DType::f32}, {x.shape[0], weight.out_features()});
  if (options.bias.data != nullptr)
    check_contiguous(op, "bias", options.bias, ctx, {DType::f32}, {weight.out_features()});
  if (y.numel() == 0) return;
  cpu::linear(threads_of(op, ctx), x, weight, options, y);
}

}  // namespace deltaic::ops

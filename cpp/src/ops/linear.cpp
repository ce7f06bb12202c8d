#include "cpp/src/ops/linear.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

bool linear_fuses(const Context& ctx, TensorView x, const Weight& weight) {
  return ctx.device.type == DeviceType::cuda && cuda::linear_fuses(x, weight);
}

void linear(const Context& ctx, TensorView x, const Weight& weight, const LinearOptions& options, TensorView y) {
  const char* op = "linear";
  const bool on_cpu = ctx.device.type == DeviceType::cpu;
  check_tensor(op, "x", x, ctx, float_types(ctx), {kAnySize, kAnySize});
  check_tensor(op, "weight", weight.view, ctx, {DType::f32, DType::f16, DType::bf16}, {kAnySize, x.shape[1]});
  check_tensor(op, "y", y, ctx, float_types(ctx), {x.shape[0], weight.out_features() / (options.silu_mul ? 2 : 1)});
  DELTAIC_CHECK(on_cpu || x.dtype == DType::f32 || x.dtype == weight.view.dtype, op, ": x is ", name(x.dtype),
                ", weight is ", name(weight.view.dtype));
  DELTAIC_CHECK(y.dtype == x.dtype || y.dtype == DType::f32, op, ": x is ", name(x.dtype), ", y is ", name(y.dtype));
  if (options.bias.data != nullptr)
    check_contiguous(op, "bias", options.bias, ctx, {DType::f32}, {weight.out_features()});
  if (options.norm.is_set()) check_contiguous(op, "norm", options.norm.weight, ctx, {DType::f32}, {x.shape[1]});
  DELTAIC_CHECK((!options.norm.is_set() && !options.silu_mul) || (!options.accumulate && linear_fuses(ctx, x, weight)),
                op, ": ", x.shape[0], " tokens of ", name(x.dtype), " take no norm and no silu_mul");
  if (y.numel() == 0) return;
  if (on_cpu) return cpu::linear(threads_of(op, ctx), x, weight, options, y);
  cuda::linear(ctx.stream, ctx.matmul, x, weight, options, y);
}

}  // namespace deltaic::ops

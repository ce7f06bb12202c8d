#include "cpp/src/ops/rms_norm.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {
namespace {

void check_float(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                 std::initializer_list<std::int64_t> shape) {
  if (ctx.device.type == DeviceType::cpu) return check_tensor(op, name, tensor, ctx, {DType::f32}, shape);
  check_tensor(op, name, tensor, ctx, {DType::f32, DType::f16, DType::bf16}, shape);
}

}  // namespace

void rms_norm(const Context& ctx, TensorView x, TensorView weight, float eps, TensorView y) {
  const char* op = "rms_norm";
  check_float(op, "x", x, ctx, {kAnySize, kAnySize});
  check_float(op, "y", y, ctx, {x.shape[0], x.shape[1]});
  check_contiguous(op, "weight", weight, ctx, {DType::f32}, {x.shape[1]});
  DELTAIC_CHECK(x.dtype == y.dtype, op, ": x is ", name(x.dtype), ", y is ", name(y.dtype));
  if (x.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::rms_norm(threads_of(op, ctx), x, weight, eps, y);
    case DeviceType::cuda:
      return cuda::rms_norm(ctx.stream, x, weight, eps, y);
  }
}

void gated_rms_norm(const Context& ctx, TensorView x, TensorView z, TensorView weight, float eps, TensorView y) {
  const char* op = "gated_rms_norm";
  check_float(op, "x", x, ctx, {kAnySize, kAnySize, kAnySize});
  check_float(op, "z", z, ctx, {x.shape[0], x.shape[1], x.shape[2]});
  check_float(op, "y", y, ctx, {x.shape[0], x.shape[1], x.shape[2]});
  check_contiguous(op, "weight", weight, ctx, {DType::f32}, {x.shape[2]});
  DELTAIC_CHECK(x.dtype == y.dtype && x.dtype == z.dtype, op, ": x is ", name(x.dtype), ", z is ", name(z.dtype),
                ", y is ", name(y.dtype));
  if (x.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::gated_rms_norm(threads_of(op, ctx), x, z, weight, eps, y);
    case DeviceType::cuda:
      return cuda::gated_rms_norm(ctx.stream, x, z, weight, eps, y);
  }
}

}  // namespace deltaic::ops

#include "cpp/src/ops/embedding.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void embedding(const Context& ctx, TensorView ids, const Weight& table, TensorView y) {
  const char* op = "embedding";
  check_contiguous(op, "ids", ids, ctx, {DType::i32}, {kAnySize});
  check_tensor(op, "table", table.view, ctx, {DType::f32, DType::f16, DType::bf16}, {kAnySize, kAnySize});
  check_tensor(op, "y", y, ctx, float_types(ctx), {ids.shape[0], table.view.shape[1]});
  if (y.numel() == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::embedding(threads_of(op, ctx), ids, table, y);
    case DeviceType::cuda:
      return cuda::embedding(ctx.stream, ids, table, y);
  }
}

}  // namespace deltaic::ops

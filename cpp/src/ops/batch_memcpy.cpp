#include "cpp/src/ops/batch_memcpy.h"

#include "cpp/src/check.h"

namespace deltaic::ops {

namespace {

void check_vector(const Context& ctx, const TensorView& x, std::string_view what) {
  DELTAIC_CHECK(x.rank == 1 && x.is_contiguous(), "batch_memcpy: ", what, " must be a contiguous vector, has rank ",
                x.rank);
  DELTAIC_CHECK(x.device == ctx.device, "batch_memcpy: ", what, " is not on the device of the context");
}

}  // namespace

void batch_memcpy(const Context& ctx, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes) {
  check_vector(ctx, src_ptrs, "src_ptrs");
  check_vector(ctx, dst_ptrs, "dst_ptrs");
  check_vector(ctx, sizes, "sizes");
  DELTAIC_CHECK(src_ptrs.dtype == DType::i64 && dst_ptrs.dtype == DType::i64,
                "batch_memcpy: addresses must be i64, are ", name(src_ptrs.dtype), " and ", name(dst_ptrs.dtype));
  DELTAIC_CHECK(sizes.dtype == DType::i32 || sizes.dtype == DType::i64, "batch_memcpy: sizes must be i32 or i64, are ",
                name(sizes.dtype));
  DELTAIC_CHECK(src_ptrs.shape[0] == dst_ptrs.shape[0] && src_ptrs.shape[0] == sizes.shape[0],
                "batch_memcpy: ", src_ptrs.shape[0], " sources, ", dst_ptrs.shape[0], " destinations, ", sizes.shape[0],
                " sizes");
  if (src_ptrs.shape[0] == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      DELTAIC_CHECK(ctx.threads != nullptr, "batch_memcpy: the context has no threads");
      return cpu::batch_memcpy(*ctx.threads, src_ptrs, dst_ptrs, sizes);
    case DeviceType::cuda:
      return cuda::batch_memcpy(ctx.stream, src_ptrs, dst_ptrs, sizes);
  }
}

}  // namespace deltaic::ops

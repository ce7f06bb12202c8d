#pragma once

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {
// A norm that another op applies to what it reads; without a weight none.
struct FusedNorm {
  TensorView weight{};  // [hidden_size] f32
  float eps = 0.0F;
  bool is_set() const { return weight.data != nullptr; }
};

// y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight, in f32. A zero-centred norm passes 1 + w, folded at load.
//   x, y    [num_tokens, hidden_size]  f32 (CPU); f32 | f16 | bf16 (CUDA); rows contiguous; y may be x
//   weight  [hidden_size]              f32
// num_tokens may be 0. Throws InvalidArgument for a shape, dtype or device that does not fit.
void rms_norm(const Context& ctx, TensorView x, TensorView weight, float eps, TensorView y);

// y[t, h, :] = x[t, h, :] / RMS(x[t, h, :]) * weight * silu(z[t, h, :])   (docs/models.md, "Norms")
//   x, y    [num_tokens, num_heads, dim]  as above; heads and dim contiguous; y may be x
//   z       [num_tokens, num_heads, dim]  any token and head stride, dim contiguous
//   weight  [dim]                         f32
void gated_rms_norm(const Context& ctx, TensorView x, TensorView z, TensorView weight, float eps, TensorView y);
}  // namespace ops

namespace cpu {
void rms_norm(ThreadPool& threads, TensorView x, TensorView weight, float eps, TensorView y);
void gated_rms_norm(ThreadPool& threads, TensorView x, TensorView z, TensorView weight, float eps, TensorView y);
}  // namespace cpu
namespace cuda {
void rms_norm(ops::Stream stream, TensorView x, TensorView weight, float eps, TensorView y);
void gated_rms_norm(ops::Stream stream, TensorView x, TensorView z, TensorView weight, float eps, TensorView y);
}  // namespace cuda

}  // namespace deltaic

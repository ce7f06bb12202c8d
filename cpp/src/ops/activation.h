#pragma once

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {
// y[t, i] = silu(gate[t, i]) * up[t, i].
//   gate, up, y  [num_tokens, size]  f32 (CPU); one of f32 | f16 | bf16 (CUDA); rows contiguous, any row stride; y may
//   be gate or up
void silu_mul(const Context& ctx, TensorView gate, TensorView up, TensorView y);

// x[t, h, :] *= sigmoid(gate[t, h, :])   (the attention output gate)
//   x     [num_tokens, num_heads, dim]  contiguous; dtypes as above
//   gate  [num_tokens, num_heads, dim]  any token and head stride, dim contiguous
void sigmoid_mul(const Context& ctx, TensorView gate, TensorView x);
}  // namespace ops

namespace cpu {
void silu_mul(ThreadPool& threads, TensorView gate, TensorView up, TensorView y);
void sigmoid_mul(ThreadPool& threads, TensorView gate, TensorView x);
}  // namespace cpu
namespace cuda {
void silu_mul(ops::Stream stream, TensorView gate, TensorView up, TensorView y);
void sigmoid_mul(ops::Stream stream, TensorView gate, TensorView x);
}  // namespace cuda

}  // namespace deltaic

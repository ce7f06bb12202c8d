#pragma once

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/rms_norm.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

namespace ops {
struct LinearOptions {
  TensorView bias;          // [out_features] f32; data null: none
  bool accumulate = false;  // y += instead of y =
  // Only where linear_fuses() says so, and not with accumulate:
  FusedNorm norm{};       // the product of rms_norm(x)
  bool silu_mul = false;  // y[t, i] = silu(row i) * (row i + out_features / 2): half as many columns; without bias
};

// Whether linear takes a norm or silu_mul for this x and weight: on CUDA, for few tokens of f16 or bf16.
bool linear_fuses(const Context& ctx, TensorView x, const Weight& weight);

// y[t, :] = x[t, :] W^T (+ bias), products and sums in f32.
//   x       [num_tokens, in_features]   f32 (CPU); f32 | f16 | bf16 (CUDA); rows contiguous, any row stride
//   weight  [out_features, in_features] f32 | f16 | bf16; on CUDA the dtype of x, unless that is f32
//   y       [num_tokens, out_features]  dtype of x or f32; rows contiguous, any row stride; must not overlap x
// The order in which one element is summed does not depend on num_tokens: a row gives the same bits in any batch. On
// CUDA that holds in f32, and in f16 and bf16 among batches of up to 16 tokens; larger ones go to cuBLASLt, which
// chooses by size. There ctx.matmul is needed, and y is rounded once more with a bias and once more with accumulate.
void linear(const Context& ctx, TensorView x, const Weight& weight, const LinearOptions& options, TensorView y);
inline void linear(const Context& ctx, TensorView x, const Weight& weight, TensorView y) {
  linear(ctx, x, weight, {}, y);
}
}  // namespace ops

namespace cpu {
void linear(ThreadPool& threads, TensorView x, const ops::Weight& weight, const ops::LinearOptions& options,
            TensorView y);
}
namespace cuda {
bool linear_fuses(TensorView x, const ops::Weight& weight);
void linear(ops::Stream stream, Matmul* matmul, TensorView x, const ops::Weight& weight,
            const ops::LinearOptions& options, TensorView y);
}  // namespace cuda

}  // namespace deltaic

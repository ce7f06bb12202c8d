#pragma once

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

namespace ops {
struct LinearOptions {
  TensorView bias;          // [out_features] f32; data null: none
  bool accumulate = false;  // y += instead of y =
};

// y[t, :] = x[t, :] W^T (+ bias), products and sums in f32.
//   x       [num_tokens, in_features]   f32 (CPU); rows contiguous, any row stride
//   weight  [out_features, in_features] f32 | f16 | bf16
//   y       [num_tokens, out_features]  f32 (CPU); rows contiguous, any row stride; must not overlap x
// The order in which one element is summed does not depend on num_tokens: a row gives the same bits in any batch.
void linear(const Context& ctx, TensorView x, const Weight& weight, const LinearOptions& options, TensorView y);
inline void linear(const Context& ctx, TensorView x, const Weight& weight, TensorView y) {
  linear(ctx, x, weight, {}, y);
}
}  // namespace ops

namespace cpu {
void linear(ThreadPool& threads, TensorView x, const ops::Weight& weight, const ops::LinearOptions& options,
            TensorView y);
}

}  // namespace deltaic

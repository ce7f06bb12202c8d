#pragma once

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic::cuda {

// What a streaming kernel does besides the product, all in f32 before the one rounding to y's dtype.
struct StreamingLinearArgs {
  TensorView x;            // [num_tokens, in_features] bf16 | f16, rows contiguous, row starts 16-byte aligned
  ops::Weight weight;      // [out_features, in_features], dtype of x; with silu_mul the gate rows, then the up rows
  TensorView norm_weight;  // [in_features] f32: y = rms_norm(x) W^T; data null: no norm
  float eps = 0.0F;
  TensorView bias;          // [out_features] f32; data null: none; not with silu_mul
  bool accumulate = false;  // y += (the residual); not with silu_mul
  bool silu_mul = false;    // y[t, i] = silu(row i) * row(i + out_features / 2): y has out_features / 2 columns
  TensorView y;  // [num_tokens, out_features] dtype of x, or f32 without accumulate and silu_mul; rows contiguous
};

// Few tokens against a large matrix, bound by reading the weights once: at most kMaxStreamingTokens tokens,
// in_features a multiple of 64,
// and the tokens must fit into shared memory.
inline constexpr int kMaxStreamingTokens = 16;
bool can_stream_linear(const StreamingLinearArgs& args);
void streaming_linear(ops::Stream stream, const StreamingLinearArgs& args);

}  // namespace deltaic::cuda

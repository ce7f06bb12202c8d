#pragma once

#include <cstddef>

#include "cpp/src/ops/context.h"

namespace deltaic::cuda {

// One MoE layer for few tokens, in two kernels:
//   y[t, :] += sum over j of weights[t, j] * SwiGLU of expert_ids[t, j]
//              + shared_weights[t] * SwiGLU of the shared expert
// in f32, in the order j = 0, 1, ..., the shared expert last. An id outside [0, num_experts) adds nothing; the ids of a
// token differ. Row starts of x and y, and the weights, are 16-byte aligned.
// x, ids and weights must not come from the kernel just before, unless that is launched dependently and lets the next
// begin only when it has itself waited: what lies before the first wait reads them. Rather, `logits` may.
struct MoeStreamingArgs {
  TensorView x;            // [num_tokens, hidden] bf16 | f16
  TensorView norm_weight;  // [hidden] f32: of rms_norm(x); data null: no norm
  float eps = 0.0F;
  TensorView gate_up;         // [num_experts, 2 * intermediate, hidden], the gate rows first; contiguous, dtype of x
  TensorView down;            // [num_experts, hidden, intermediate]
  TensorView expert_ids;      // [num_tokens, k] i32
  TensorView weights;         // [num_tokens, k] f32
  TensorView shared_gate_up;  // [2 * intermediate, hidden]; data null: no shared expert
  TensorView shared_down;     // [hidden, intermediate]
  TensorView shared_logits;   // [num_tokens] f32, any stride: the shared expert's weight is their sigmoid
  TensorView scratch;         // moe_streaming_scratch_bytes(...)
  TensorView y;               // [num_tokens, hidden] dtype of x
};

inline constexpr int kMaxMoeStreamingTokens = 16;
bool can_stream_moe(const MoeStreamingArgs& args);
std::size_t moe_streaming_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t intermediate);
void moe_streaming(ops::Stream stream, const MoeStreamingArgs& args);

}  // namespace deltaic::cuda

#pragma once

#include <cstddef>

#include "cpp/src/ops/context.h"

namespace deltaic::cuda {

// y[t, :] += sum over j of weights[t, j] * SwiGLU of expert_ids[t, j], in the order j = 0, 1, ..., in f32; what an
// expert gives is rounded to the dtype of x before. An id outside [0, num_experts) adds nothing. Row starts of x and
// the weights are 16-byte aligned.
struct MoeGroupedArgs {
  TensorView x;           // [num_tokens, hidden] bf16 | f16
  TensorView gate_up;     // [num_experts, 2 * intermediate, hidden], the gate rows first; contiguous, dtype of x
  TensorView down;        // [num_experts, hidden, intermediate]
  TensorView expert_ids;  // [num_tokens, k] i32
  TensorView weights;     // [num_tokens, k] f32
  TensorView scratch;     // moe_grouped_scratch_bytes(...)
  TensorView y;           // [num_tokens, hidden] dtype of x
};

// On sm_90. hidden and intermediate must be multiples of 64, num_experts at most 1024.
bool can_group_moe(const MoeGroupedArgs& args);
std::size_t moe_grouped_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t num_experts,
                                      std::int64_t hidden, std::int64_t intermediate);
void moe_grouped(ops::Stream stream, const MoeGroupedArgs& args);

}  // namespace deltaic::cuda

#pragma once

#include "cpp/src/ops/context.h"

namespace deltaic::cuda {

// As ops::moe_experts; x, gate_up, down and y in one dtype of f32, f16, bf16; any size. scratch: [num_tokens * k,
// intermediate] f32.
void moe_plain(ops::Stream stream, TensorView x, TensorView gate_up, TensorView down, TensorView expert_ids,
               TensorView weights, TensorView scratch, TensorView y);

}  // namespace deltaic::cuda

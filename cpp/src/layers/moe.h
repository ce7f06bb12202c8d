#pragma once

#include <optional>

#include "cpp/src/layers/mlp.h"
#include "cpp/src/ops/moe.h"

namespace deltaic {

// Mixture of experts, with a shared expert where the model has one (model-spec section 10).
struct Moe {
  int num_experts_per_token = 0;
  bool renormalize = false;
  ops::Weight router;
  ops::ExpertWeights experts;
  std::optional<Mlp> shared_expert;
  ops::Weight shared_expert_gate;  // [1, hidden_size]

  // y += moe(x).
  //   x, y  [num_tokens, hidden_size]
  void forward(const ops::Context& ctx, TensorView x, Workspace& workspace, TensorView y) const;

  struct Buffers {
    TensorView router_logits;   // [num_tokens, num_experts]
    TensorView expert_ids;      // [num_tokens, num_experts_per_token] i32
    TensorView expert_weights;  // [num_tokens, num_experts_per_token]
    TensorView expert_scratch;  // bytes
    Mlp::Buffers shared_expert;
    TensorView shared_gate;  // [num_tokens, 1]
    TensorView shared_out;   // [num_tokens, hidden_size]
  };
  Buffers take_buffers(Workspace& workspace, std::int64_t num_tokens) const;
};

}  // namespace deltaic

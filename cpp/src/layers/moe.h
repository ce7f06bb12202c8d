#pragma once

#include <optional>

#include "cpp/src/layers/mlp.h"
#include "cpp/src/ops/moe.h"

namespace deltaic {

// Mixture of experts, with a shared expert where the model has one (docs/models.md, "Feed-forward").
struct Moe {
  int num_experts = 0, num_experts_per_token = 0;
  std::int64_t intermediate_size = 0;
  bool renormalize = false;
  bool has_shared_expert = false;
  Projection router;                 // [an expert each | the shared expert's gate]
  ops::ExpertWeights experts;        // the shared expert is the last of them, unless
  std::optional<Mlp> shared_expert;  // it stands apart: on the CPU, and where its size is another

  // y += moe(input).
  //   y  [num_tokens, hidden_size]; may be the input's residual stream
  void forward(const ops::Context& ctx, LayerInput& input, const StepShape& shape, Workspace& workspace,
               TensorView y) const;

  struct Buffers {
    TensorView router_logits;   // [num_tokens, router.row_size]
    TensorView expert_ids;      // [num_tokens, experts a token] i32, a shared one among them included
    TensorView expert_weights;  // [num_tokens, experts a token]
    TensorView expert_scratch;  // bytes
    Mlp::Buffers shared_expert;
    TensorView shared_out;  // [num_tokens, hidden_size]
  };
  Buffers take_buffers(Workspace& workspace, const StepShape& shape) const;

 private:
  bool is_shared_among_experts() const { return has_shared_expert && !shared_expert; }
};

}  // namespace deltaic

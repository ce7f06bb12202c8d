#pragma once

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/projection.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/rotary.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// What the attention layers of a step share. Shapes and lengths as in ForwardInputs.
struct AttentionStep {
  const ops::RotaryTable* rotary = nullptr;
  TensorView positions, query_start_loc, seq_lens, block_table, slot_mapping;
  int max_query_len = 0;
};

// Full attention over a paged cache (docs/models.md, "Full attention").
struct Attention {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool output_gate = false;
  float eps = 1e-6F;
  Projection qkv_proj;  // [q | k | v]; with output_gate a head of q is head_dim of q, head_dim of gate
  ops::Weight o_proj;
  Tensor o_bias;          // f32; without memory when the model has none
  Tensor q_norm, k_norm;  // [head_dim] f32, what the norm multiplies with

  // y += attention(input); K and V of the step are stored in the caches.
  //   y  [num_tokens, hidden_size]; may be the input's residual stream
  void forward(const ops::Context& ctx, LayerInput& input, const StepShape& shape, const AttentionStep& step,
               TensorView k_cache, TensorView v_cache, Workspace& workspace, TensorView y) const;

  struct Buffers {
    TensorView qkv;      // [num_tokens, qkv_proj.row_size]
    TensorView out;      // [num_tokens, num_heads * head_dim]
    TensorView partial;  // bytes: what paged_attention needs for decodes on CUDA
  };
  Buffers take_buffers(Workspace& workspace, const StepShape& shape) const;
};

}  // namespace deltaic

#pragma once

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/rotary.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// What the attention layers of a step share. Shapes as in ForwardInputs.
struct AttentionStep {
  const ops::RotaryTable* rotary = nullptr;
  TensorView positions, query_start_loc, seq_lens, block_table, slot_mapping;
};

// Full attention over a paged cache (model-spec section 8).
struct Attention {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool output_gate = false;  // a row of q_proj's output is then, a head: head_dim of q, head_dim of gate
  float eps = 1e-6F;
  ops::Weight q_proj, k_proj, v_proj, o_proj;
  Tensor q_bias, k_bias, v_bias, o_bias;  // f32; without memory when the model has none
  Tensor q_norm, k_norm;                  // [head_dim] f32, what the norm multiplies with

  // y += attention(x); K and V of the step are stored in the caches.
  //   x, y  [num_tokens, hidden_size]
  void forward(const ops::Context& ctx, TensorView x, const AttentionStep& step, TensorView k_cache, TensorView v_cache,
               Workspace& workspace, TensorView y) const;

  struct Buffers {
    TensorView q;     // [num_tokens, num_heads * head_dim, or twice that with the gate]
    TensorView k, v;  // [num_tokens, num_kv_heads * head_dim]
    TensorView out;   // [num_tokens, num_heads * head_dim]
  };
  Buffers take_buffers(Workspace& workspace, std::int64_t num_tokens) const;
};

}  // namespace deltaic

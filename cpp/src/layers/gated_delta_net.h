#pragma once

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/projection.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/gated_delta_net.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// The recurrent mixer (docs/models.md, "Gated DeltaNet").
struct GatedDeltaNet {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;  // where q, k, v, z, b and a are in a row of in_proj
  Projection in_proj;
  float eps = 1e-6F;
  Tensor conv1d;          // [conv_dim, 1, conv_kernel] f32
  Tensor A_log, dt_bias;  // [num_value_heads] f32
  Tensor norm;            // [value_head_dim] f32, plain
  ops::Weight out_proj;

  // y += mixer(input); the states of the sequences are advanced.
  //   replay  what verified sequences need (ops/gated_delta_net.h)
  //   y  [num_tokens, hidden_size]; may be the input's residual stream
  void forward(const ops::Context& ctx, LayerInput& input, const StepShape& step, const ops::GdnSequences& sequences,
               TensorView conv_state, TensorView temporal, TensorView replay, Workspace& workspace, TensorView y) const;

  struct Buffers {
    TensorView proj;   // [num_tokens, in_proj.row_size]
    TensorView mixer;  // what gdn_mixer needs
    TensorView out;    // [num_tokens, num_value_heads * value_head_dim]
  };
  Buffers take_buffers(Workspace& workspace, const StepShape& step) const;
};

}  // namespace deltaic

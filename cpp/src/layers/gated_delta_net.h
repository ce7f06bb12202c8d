#pragma once

#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/gated_delta_net.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// The recurrent mixer (model-spec section 9).
struct GatedDeltaNet {
  // Input projections write beside each other into one row a token; `layout` says where q, k, v, z, b and a are in it.
  struct Projection {
    ops::Weight weight;
    std::int64_t first_column = 0;
  };

  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  std::vector<Projection> in_proj;
  std::int64_t row_size = 0;
  float eps = 1e-6F;
  Tensor conv1d;          // [conv_dim, 1, conv_kernel] f32
  Tensor A_log, dt_bias;  // [num_value_heads] f32
  Tensor norm;            // [value_head_dim] f32, plain
  ops::Weight out_proj;

  // y += mixer(x); the states of the sequences are advanced.
  //   x, y  [num_tokens, hidden_size]
  void forward(const ops::Context& ctx, TensorView x, const ops::GdnSequences& sequences, TensorView conv_state,
               TensorView temporal, Workspace& workspace, TensorView y) const;

  // Appends a projection to the row.
  void add_projection(ops::Weight weight);

  struct Buffers {
    TensorView proj;   // [num_tokens, row_size]
    TensorView mixer;  // what gdn_mixer needs
    TensorView out;    // [num_tokens, num_value_heads * value_head_dim]
  };
  Buffers take_buffers(Workspace& workspace, std::int64_t num_tokens) const;
};

}  // namespace deltaic

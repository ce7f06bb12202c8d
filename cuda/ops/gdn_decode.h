#pragma once

#include "cpp/src/ops/gated_delta_net.h"

namespace deltaic::cuda {

// The whole of a GDN layer between its projections, for sequences of one new token: convolution, SiLU, l2 norms, gates,
// delta rule and gated norm (docs/models.md, "Gated DeltaNet").
struct GdnDecodeArgs {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  TensorView proj;            // [num_seqs, row] f32 | f16 | bf16, rows contiguous
  TensorView conv_weight;     // [conv_dim, conv_kernel] f32
  TensorView A_log, dt_bias;  // [num_value_heads] f32
  TensorView norm_weight;     // [value_head_dim] f32
  float eps = 1e-6F;
  TensorView state_indices;      // [num_seqs] i32; -1: an inert padding row
  TensorView has_initial_state;  // [num_seqs] u8
  TensorView conv_state;         // [num_slots, conv_dim, >= conv_kernel - 1] dtype of proj
  TensorView temporal;           // [num_slots, num_value_heads, value_head_dim, key_head_dim] f32 | bf16
  TensorView workspace;          // [gdn_decode_workspace_bytes] u8, 16-byte aligned
  TensorView out;                // [num_seqs, num_value_heads, value_head_dim] dtype of proj; rows of padding are 0
};
// Head dims of 128, conv_kernel 4, at most 4 value heads a key head, f32 or bf16 state in 16-byte aligned slots, on
// sm_90 and sm_100.
bool can_decode_gdn(const GdnDecodeArgs& args);
void gdn_decode(ops::Stream stream, const GdnDecodeArgs& args);
std::size_t gdn_decode_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_seqs);

}  // namespace deltaic::cuda

#pragma once

#include <cstdint>

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {

// Where a GDN layer's projections lie in a row of `proj`, in elements. One description serves the four separate
// projections of Qwen3.5 (heads in order) and the fused, grouped ones of Qwen3-Next (groups by key head):
// q of key head g starts at q + g * q_stride, v of value head h = g * r + j at v + g * v_group_stride + j * dv, ...
struct GdnProjectionLayout {
  std::int64_t q = 0, q_stride = 0;
  std::int64_t k = 0, k_stride = 0;
  std::int64_t v = 0, v_group_stride = 0;
  std::int64_t z = 0, z_group_stride = 0;
  std::int64_t b = 0, b_group_stride = 0;  // one value a value head
  std::int64_t a = 0, a_group_stride = 0;
};

struct GdnShape {
  int num_key_heads = 0, num_value_heads = 0, key_head_dim = 0, value_head_dim = 0, conv_kernel = 0;
  int heads_per_group() const { return num_value_heads / num_key_heads; }
  int conv_dim() const { return 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim; }
};

// Which sequences a step runs, and where their states are.
struct GdnSequences {
  TensorView query_start_loc;    // [num_seqs + 1] i32
  TensorView state_indices;      // [num_seqs] i32, any stride; -1: an inert padding row (nothing read or written)
  TensorView has_initial_state;  // [num_seqs] u8; 0: the slot's content is ignored and both states start at zero
  int num_decodes = 0;           // the first so many have one token each, sequence i token i; 0 is always right
  // Drafts (spec/speculative.md B.2, B.3). [num_seqs] i32; none: as if all were 0.
  //   0      a plain sequence, as above
  //   a > 0  a verified one, of 1 to num_draft_tokens + 1 tokens, of which its step before accepted a. Its states take
  //          the slots from its state index on: the one behind token t of this step goes to slot index + t, and it
  //          starts from slot index + a - 1. Its conv state is in the first slot alone, where the inputs before this
  //          step begin at position a - 1; it becomes the last conv_kernel - 2 of these and all inputs of this step.
  //          Tokens give the bits of as many steps of one token.
  TensorView num_accepted{};
  int num_draft_tokens = 0;  // the most a verified sequence may have

  bool has_drafts() const { return num_accepted.data != nullptr; }
};

// Depthwise causal convolution over q, k, v, then SiLU (model-spec 9.2), continuing from and updating the conv state.
//   proj        [num_tokens, row] f32 (CPU); f32 | f16 | bf16 (CUDA); rows contiguous, any row stride
//   weight      [conv_dim, conv_kernel] f32, channels in the plain order q | k | v; tap conv_kernel - 1 meets the
//               current token
//   conv_state  [num_slots, conv_dim, >= conv_kernel - 1 + num_draft_tokens] f32 | f16 | bf16, any slot stride: the
//   last
//               conv_kernel - 1 inputs of each channel, oldest first
//   out         [num_tokens, conv_dim] dtype of proj, contiguous, plain order
void causal_conv(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView proj,
                 TensorView weight, const GdnSequences& sequences, TensorView conv_state, TensorView out);

// The gated delta rule (model-spec 9.3) with its gates and l2 norms, continuing from and updating the state.
//   qkv       [num_tokens, conv_dim] f32 (CPU); f32 | f16 | bf16 (CUDA): what causal_conv gave
//   proj      [num_tokens, row] dtype of qkv: b and a are read from it
//   A_log, dt_bias  [num_value_heads] f32
//   temporal  [num_slots, num_value_heads, value_head_dim, key_head_dim] f32 | bf16 | f16, any slot stride
//   out       [num_tokens, num_value_heads, value_head_dim] dtype of qkv, contiguous
// The state of a sequence is advanced token by token in f32 and rounded to the state's dtype once, at the end of its
// span: with f32 state, any split of a sequence gives the same bits.
void gated_delta_rule(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView qkv,
                      TensorView proj, TensorView A_log, TensorView dt_bias, const GdnSequences& sequences,
                      TensorView temporal, TensorView out);

}  // namespace ops

namespace cpu {
void causal_conv(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out);
void gated_delta_rule(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView out);
}  // namespace cpu
namespace cuda {
void causal_conv(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out);
void gated_delta_rule(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView out);
}  // namespace cuda

}  // namespace deltaic

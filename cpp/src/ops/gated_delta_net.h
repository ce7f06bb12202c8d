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
  constexpr int heads_per_group() const { return num_value_heads / num_key_heads; }
  constexpr int conv_dim() const { return 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim; }
  // Numbers of a replay row: how a token changes the states S of a layer, S := decay * S + update k^T. First k of the
  // key heads, then update of the value heads, then decay of these.
  constexpr int replay_size() const {
    return num_key_heads * key_head_dim + num_value_heads * value_head_dim + num_value_heads;
  }
  constexpr int replay_update() const { return num_key_heads * key_head_dim; }
  constexpr int replay_decay() const { return replay_update() + num_value_heads * value_head_dim; }
};

// What a sequence starts from: values of GdnSequences::has_initial_state.
enum class InitialState : std::uint8_t {
  zero,   // the slot's content is ignored, and both states start at zero
  slot,   // the states in the slot
  replay  // a verified sequence behind a verified step: the temporal state in the slot lacks the tokens accepted there
};

// Which sequences a step runs, and where their states are.
struct GdnSequences {
  TensorView query_start_loc;    // [num_seqs + 1] i32
  TensorView state_indices;      // [num_seqs] i32, any stride; -1: an inert padding row (nothing read or written)
  TensorView has_initial_state;  // [num_seqs] u8: InitialState
  // The first so many are decodes; 0 is always right. Without drafts they have one token each, sequence i token i; with
  // drafts they are verified, and no other sequence is.
  int num_decodes = 0;
  // Drafts (docs/decisions/0010-speculative-decoding.md, "Where the states are"). [num_seqs] i32; none: as if all were
  // 0.
  //   0      a plain sequence: its states end behind its last token
  //   a > 0  a verified one, of 1 to num_draft_tokens + 1 tokens. With InitialState::replay its step before accepted a
  //          of its tokens: their rows in `replay` change the state in the slot, which is written back, and its inputs
  //          before this step begin at position a - 1 of the conv state; otherwise a means nothing, and they begin at
  //          0. The tokens of this step leave the state alone and a row each in `replay`; the conv state becomes the
  //          last conv_kernel - 2 inputs before it and all of its own. (CPU: the only token of a sequence goes into the
  //          state at once, and leaves a row that changes nothing.) Tokens give the bits of as many steps of one token
  //          (CUDA: with f32 activations and gated_delta_rule; otherwise up to rounding).
  TensorView num_accepted{};
  int num_draft_tokens = 0;  // the most a verified sequence may have
  // Verified sequences, [num_seqs] i32 both or none: the states behind token `offset` of this step also go to a slot
  // that no sequence has. An offset that is no token of the sequence: none is written.
  TensorView snapshot_slots{};
  TensorView snapshot_offsets{};

  bool has_drafts() const { return num_accepted.data != nullptr; }
  int num_verified() const { return has_drafts() ? num_decodes : 0; }  // that the host knows of
  bool has_snapshots() const { return snapshot_slots.data != nullptr; }
};

// Depthwise causal convolution over q, k, v, then SiLU (docs/models.md, "Causal convolution"), continuing from and
// updating the conv state.
//   proj        [num_tokens, row] f32 (CPU); f32 | f16 | bf16 (CUDA); rows contiguous, any row stride
//   weight      [conv_dim, conv_kernel] f32, channels in the plain order q | k | v; tap conv_kernel - 1 meets the
//               current token
//   conv_state  [num_slots, conv_dim, >= conv_kernel - 1 + num_draft_tokens] f32 | f16 | bf16, any slot stride:
//               the last conv_kernel - 1 inputs of each channel, oldest first
//   out         [num_tokens, conv_dim] dtype of proj, contiguous, plain order
void causal_conv(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView proj,
                 TensorView weight, const GdnSequences& sequences, TensorView conv_state, TensorView out);

// The gated delta rule (docs/models.md, "Gated delta rule") with its gates and l2 norms, continuing from and updating
// the state.
//   qkv       [num_tokens, conv_dim] f32 (CPU); f32 | f16 | bf16 (CUDA): what causal_conv gave
//   proj      [num_tokens, row] dtype of qkv: b and a are read from it
//   A_log, dt_bias  [num_value_heads] f32
//   temporal  [num_slots, num_value_heads, value_head_dim, key_head_dim] f32 | bf16 | f16, any slot stride
//   replay    [num_slots, >= 1 + num_draft_tokens, replay_size()] f32, rows contiguous, any slot stride: of the tokens
//             of each slot's last verified step; none without drafts. Slots of snapshots need none.
//   out       [num_tokens, num_value_heads, value_head_dim] dtype of qkv, contiguous
// The state of a plain sequence is advanced token by token in f32 and rounded to the state's dtype once, at the end of
// its span: with f32 state, any split of a sequence gives the same bits.
void gated_delta_rule(const Context& ctx, const GdnShape& shape, const GdnProjectionLayout& layout, TensorView qkv,
                      TensorView proj, TensorView A_log, TensorView dt_bias, const GdnSequences& sequences,
                      TensorView temporal, TensorView replay, TensorView out);

}  // namespace ops

namespace cpu {
void causal_conv(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out);
void gated_delta_rule(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView replay, TensorView out);
}  // namespace cpu
namespace cuda {
void causal_conv(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out);
void gated_delta_rule(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView replay, TensorView out);
}  // namespace cuda

}  // namespace deltaic

#pragma once

#include <cstddef>

#include "cpp/src/ops/gated_delta_net.h"

namespace deltaic {

namespace ops {

struct GdnMixerArgs {
  GdnShape shape;
  GdnProjectionLayout layout;
  TensorView proj;            // [num_tokens, row] f32 (CPU); f32 | f16 | bf16 (CUDA); rows contiguous
  TensorView conv_weight;     // [conv_dim, conv_kernel] f32
  TensorView A_log, dt_bias;  // [num_value_heads] f32
  TensorView norm_weight;     // [value_head_dim] f32
  float eps = 1e-6F;
  GdnSequences sequences;
  TensorView conv_state;  // [num_slots, conv_dim, >= conv_kernel - 1]
  TensorView temporal;    // [num_slots, num_value_heads, value_head_dim, key_head_dim]
  TensorView replay{};    // [num_slots, >= 1 + num_draft_tokens, replay_size()], with drafts
  TensorView workspace;   // [gdn_mixer_workspace_bytes] u8, 64-byte aligned
  TensorView out;         // [num_tokens, num_value_heads, value_head_dim] dtype of proj, contiguous
};

// A GDN layer between its projections: causal_conv, gated_delta_rule and gated_rms_norm with z, as those three ops
// define them. Rows of padding sequences and of none are undefined in `out`.
// On CUDA with head dims of 128, conv_kernel 4 and up to 4 value heads a key head, the first sequences.num_decodes
// sequences take one kernel (verified ones with up to 3 drafts), and the others, for f16 and bf16, chunks of tokens on
// tensor cores: the result of a span then depends on where it begins and ends, by rounding. Otherwise the rule goes
// token by token.
void gdn_mixer(const Context& ctx, const GdnMixerArgs& args);

// What gdn_mixer needs for up to num_tokens tokens of up to num_seqs sequences, up to num_verified of them
// GdnSequences::num_verified(). dtype is that of proj.
std::size_t gdn_mixer_workspace_bytes(Device device, const GdnShape& shape, DType dtype, std::int64_t num_tokens,
                                      std::int64_t num_seqs, std::int64_t num_verified = 0);

}  // namespace ops

namespace cpu {
std::size_t gdn_mixer_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_tokens);
void gdn_mixer(ThreadPool& threads, const ops::GdnMixerArgs& args);
}  // namespace cpu
namespace cuda {
std::size_t gdn_mixer_workspace_bytes(const ops::GdnShape& shape, DType dtype, std::int64_t num_tokens,
                                      std::int64_t num_seqs, std::int64_t num_verified);
void gdn_mixer(ops::Stream stream, const ops::GdnMixerArgs& args);
}  // namespace cuda

}  // namespace deltaic

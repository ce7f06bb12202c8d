#pragma once

#include "cuda/ops/gdn_decode.h"

namespace deltaic::cuda {

// gdn_decode for verified sequences (GdnSequences::num_accepted) of up to 4 tokens.
struct GdnVerifyArgs {
  GdnDecodeArgs layer;         // proj and out have a row a token; no workspace is needed; rows of padding become 0
  TensorView query_start_loc;  // [num_seqs + 1] i32
  TensorView num_accepted;     // [num_seqs] i32, above 0
  int num_draft_tokens = 0;    // at most 3
  TensorView snapshot_slots, snapshot_offsets;  // [num_seqs] i32, or none
  TensorView replay;                            // [num_slots, >= 1 + num_draft_tokens, replay_size()] f32
};
// What can_decode_gdn asks, up to 3 drafts, and rows of replay in multiples of 16 bytes.
bool can_verify_gdn(const GdnVerifyArgs& args);
void gdn_verify(ops::Stream stream, const GdnVerifyArgs& args);
std::size_t gdn_verify_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_seqs);

}  // namespace deltaic::cuda

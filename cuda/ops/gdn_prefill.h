#pragma once

#include <cstddef>

#include "cpp/src/ops/gated_delta_net.h"

namespace deltaic::cuda {

// gated_delta_rule for long spans, in chunks of 64 tokens on tensor cores (docs/models.md, "Gated delta rule in
// chunks").
//   qkv, proj, out  f16 | bf16, the dtype of one is that of all; the rest as gated_delta_rule
// Chunks are counted from a span's first token, so a span has the same bits alone and batched. Gates, sums, the
// triangular inverse and the state are f32; the factors of the products (q, k, v, the state's copy) are rounded to
// bf16.
struct GdnPrefillArgs {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  TensorView qkv, proj, A_log, dt_bias;
  ops::GdnSequences sequences;
  TensorView temporal;
  TensorView workspace;  // gdn_prefill_workspace_bytes bytes, 128-byte aligned
  TensorView out;
};
// Head dims of 128, at most 4 value heads a key head, 16-bit activations in 16-byte aligned rows, f32 or bf16 state, on
// sm_90 and sm_100.
bool can_prefill_gdn(const GdnPrefillArgs& args);
std::size_t gdn_prefill_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_tokens, std::int64_t num_seqs);
void gdn_prefill(ops::Stream stream, const GdnPrefillArgs& args);

// Its first kernel: what of a chunk does not depend on the state.
void prepare_gdn_chunks(ops::Stream stream, const GdnPrefillArgs& args);
// Its second: the state from chunk to chunk, and the output. On sm_90a, and wherever can_prefill_gdn.
void walk_gdn_chunks(ops::Stream stream, const GdnPrefillArgs& args);
void walk_gdn_chunks_mma(ops::Stream stream, const GdnPrefillArgs& args);

}  // namespace deltaic::cuda

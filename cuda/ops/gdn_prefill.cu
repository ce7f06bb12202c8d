// The delta rule (docs/models.md, "Gated delta rule in chunks"): what does not depend on the state, then the walk of
// the state.
#include "cuda/ops/gdn_prefill.h"

#include "cpp/src/check.h"
#include "cuda/kernel_limits.h"
#include "cuda/ops/gdn_chunk.cuh"
#include "cuda/ops/gdn_math.cuh"

namespace deltaic::cuda {
namespace {

bool is_aligned(const TensorView& tensor, std::int64_t row_stride) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 && row_stride % 8 == 0;
}

}  // namespace

bool can_prefill_gdn(const GdnPrefillArgs& args) {
  return has_large_clusters(args.qkv.device.index) && args.shape.key_head_dim == kGdnDim &&
         args.shape.value_head_dim == kGdnDim && args.shape.heads_per_group() <= kGdnMaxRatio &&
         args.qkv.dtype != DType::f32 && (args.temporal.dtype == DType::f32 || args.temporal.dtype == DType::bf16) &&
         is_aligned(args.qkv, args.qkv.stride[0]) && is_aligned(args.out, args.out.stride[0]);
}

std::size_t gdn_prefill_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_tokens, std::int64_t num_seqs) {
  const auto num_chunks = static_cast<std::size_t>(num_pieces<kGdnChunk>(num_tokens, num_seqs));
  return num_chunks * (shape.num_key_heads * sizeof(GdnKeyTiles) + shape.num_value_heads * sizeof(GdnValueTiles));
}

void gdn_prefill(ops::Stream stream, const GdnPrefillArgs& args) {
  DELTAIC_CHECK(can_prefill_gdn(args), "gdn_prefill: head dims ", args.shape.key_head_dim, " and ",
                args.shape.value_head_dim, ", dtype ", name(args.qkv.dtype));
  const std::int64_t num_seqs = args.sequences.state_indices.shape[0], num_tokens = args.qkv.shape[0];
  const std::size_t num_bytes = gdn_prefill_workspace_bytes(args.shape, num_tokens, num_seqs);
  DELTAIC_CHECK(args.workspace.num_bytes() >= num_bytes, "gdn_prefill: the workspace has ", args.workspace.num_bytes(),
                " bytes, ", num_bytes, " are needed");
  prepare_gdn_chunks(stream, args);
  if (is_hopper(args.qkv.device.index))
    walk_gdn_chunks(stream, args);
  else
    walk_gdn_chunks_mma(stream, args);
}

}  // namespace deltaic::cuda

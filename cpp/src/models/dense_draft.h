#pragma once

#include <deltaic/runner.h>

#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/ops/context.h"

namespace deltaic {

// A greedy chain of drafts behind one sequence, with private caches (docs/models.md, "Draft module"): `next_token` is
// what the model chose behind token_ids. Throws InvalidArgument as dense_forward does, and for num_drafts < 1.
DenseDraftOutput dense_draft(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights,
                             std::shared_ptr<const MtpWeights> mtp_weights, const ops::Context& ctx,
                             std::span<const std::int32_t> token_ids, std::int32_t next_token, int num_drafts);

}  // namespace deltaic

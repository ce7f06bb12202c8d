#pragma once

#include <deltaic/runner.h>

#include "cpp/src/models/hybrid_decoder.h"

namespace deltaic {

// Logits of every position of one sequence, with private caches of just its size, in one piece (docs/models.md,
// "Decoder"). Throws InvalidArgument for no tokens, or an id outside the vocabulary.
DenseForwardOutput dense_forward(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights,
                                 const ops::Context& ctx, std::span<const std::int32_t> token_ids, bool with_hidden,
                                 std::span<const std::int64_t> positions);

}  // namespace deltaic

#pragma once

#include <cstdint>
#include <span>

#include "cpp/src/ops/top_k_top_p.h"

namespace deltaic::ops {

// What the random numbers of one output position depend on.
struct NoiseKey {
  std::uint64_t seed = 0;
  std::uint64_t position = 0;
};

// Both draw from softmax(logit / temperature): the token with the largest (logit - max_logit) / temperature + noise in
// f64, the lowest id where two are equal. Noise is gumbel(random_bits(seed, position, token id)), so both give the same
// token for the same set. `max_logit` is finite, and the largest logit of the set.

// Draws among the tokens with a logit >= lowest. -inf is never drawn.
std::int32_t draw(std::span<const float> logits, float max_logit, float temperature, float lowest, NoiseKey key);

// Draws among the candidates; there is at least one.
std::int32_t draw(std::span<const Candidate> candidates, float max_logit, float temperature, NoiseKey key);

}  // namespace deltaic::ops

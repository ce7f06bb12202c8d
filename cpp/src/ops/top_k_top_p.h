#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <deltaic/sampling_params.h>

namespace deltaic::ops {

// Tokens are ordered by logit, the best first, and by id where logits are equal.
struct Candidate {
  float logit = 0;
  std::int32_t token_id = 0;
  friend bool operator==(const Candidate&, const Candidate&) = default;
};
inline bool is_better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token_id < b.token_id);
}

// The `count` best tokens among those with a logit >= lowest, in no order; fewer where there are no more. -inf is never
// among them. Touches each logit once where `count` is small.
std::vector<Candidate> select_best(std::span<const float> logits, std::size_t count, float lowest);

// The lowest logit that min_p keeps: those with probability >= min_p times the largest. -inf when min_p is 0.
float min_p_threshold(float max_logit, float temperature, float min_p);

// The tokens that temperature, min_p, top-k and top-p leave, in no order; at least the best one. Each filter sees the
// distribution that the one before left: top-k keeps the first k in the order above, top-p the shortest beginning whose
// probability, rounded to f32, is >= top_p. `max_logit` is the row's largest, and finite.
std::vector<Candidate> filter_candidates(std::span<const float> logits, float max_logit, const SamplingParams& params);

// Whether top-k or top-p is on.
bool has_top_k(const SamplingParams& params, std::size_t vocab_size);
bool has_top_p(const SamplingParams& params);

}  // namespace deltaic::ops

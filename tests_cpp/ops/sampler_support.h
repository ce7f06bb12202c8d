#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include <deltaic/tensor.h>

#include "cpp/src/ops/sampler.h"

namespace deltaic::test {

// One row and the memory behind it.
struct OwnedRow {
  std::vector<float> logits{};
  SamplingParams params{};
  std::vector<std::int32_t> prompt{}, output{};
  std::uint64_t seed = 0;

  ops::SamplerRow view() {
    return {.logits = make_view(logits.data(), DType::f32, {static_cast<std::int64_t>(logits.size())}),
            .params = &params,
            .prompt_token_ids = prompt,
            .output_token_ids = output,
            .seed = seed};
  }
};

inline std::vector<ops::SamplerRow> views_of(std::vector<OwnedRow>& rows) {
  std::vector<ops::SamplerRow> views;
  views.reserve(rows.size());
  for (OwnedRow& row : rows) views.push_back(row.view());
  return views;
}

// Samples a copy of the row alone, in the caller.
inline ops::SampledToken sample_one(OwnedRow row) {
  const ops::SamplerRow view = row.view();
  return ops::sample({}, {&view, 1}).front();
}

inline std::vector<float> random_logits(std::size_t size, std::uint32_t seed, float scale = 3.0F) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = normal(rng);
  return logits;
}

// The whole sampler again, slow and in the plainest form: full sorts, f64, no shortcut. Logits after the processors.
std::vector<float> reference_processed(const OwnedRow& row);
// Probabilities after temperature, min_p, top-k and top-p; 0 for what they remove. For temperature > 0.
std::vector<double> reference_probabilities(const OwnedRow& row);
// The token: argmax for greedy, else argmax of logit / temperature + Gumbel noise over what the filters leave.
std::int32_t reference_token(const OwnedRow& row);

}  // namespace deltaic::test

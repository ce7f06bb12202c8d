#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "cpp/src/ops/random.h"
#include "tests_cpp/ops/sampler_support.h"

namespace deltaic::test {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Whether `tokens` ends with all of `word` but its last token.
bool is_begun(const std::vector<int>& word, const std::vector<std::int32_t>& tokens) {
  return word.size() <= tokens.size() + 1 && std::equal(word.rbegin() + 1, word.rend(), tokens.rbegin());
}

}  // namespace

std::vector<float> reference_processed(const OwnedRow& row) {
  const SamplingParams& p = row.params;
  std::vector<float> logits = row.logits;
  for (int id = 0; id < static_cast<int>(logits.size()); ++id) {
    float& logit = logits[static_cast<std::size_t>(id)];
    const auto contains = [id](const auto& ids) { return std::find(ids.begin(), ids.end(), id) != ids.end(); };
    if (!p.allowed_token_ids.empty() && !contains(p.allowed_token_ids)) logit = kMasked;
    for (const std::vector<int>& word : p.bad_words)
      if (word.back() == id && is_begun(word, row.output)) logit = kMasked;
    if (row.output.size() < static_cast<std::size_t>(p.min_tokens) && contains(p.stop_token_ids)) logit = kMasked;
    if (p.logit_bias.contains(id)) logit += p.logit_bias.at(id);
    if (contains(row.prompt) || contains(row.output))
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    const auto count = static_cast<float>(std::count(row.output.begin(), row.output.end(), id));
    logit -= p.frequency_penalty * count;
    if (count > 0) logit -= p.presence_penalty;
  }
  return logits;
}

std::vector<double> reference_probabilities(const OwnedRow& row) {
  const SamplingParams& p = row.params;
  const std::vector<float> logits = reference_processed(row);
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  const double max = logits[order.front()];
  std::vector<double> weights(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i)
    weights[i] = std::exp((static_cast<double>(logits[i]) - max) / static_cast<double>(p.temperature));
  const double least = static_cast<double>(p.min_p);
  for (double& weight : weights)
    if (weight < least) weight = 0;
  if (p.top_k > 0)
    for (std::size_t i = static_cast<std::size_t>(p.top_k); i < order.size(); ++i) weights[order[i]] = 0;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (p.top_p < 1) {
    double before = 0;
    for (const std::size_t i : order) {
      const double weight = weights[i];
      if (static_cast<float>(before / total) >= p.top_p) weights[i] = 0;
      before += weight;
    }
  }
  const double kept = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= kept;
  return weights;
}

std::int32_t reference_token(const OwnedRow& row) {
  const std::vector<float> logits = reference_processed(row);
  if (row.params.is_greedy())
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const std::vector<double> probabilities = reference_probabilities(row);
  const double max = *std::max_element(logits.begin(), logits.end());
  std::int32_t best = -1;
  double best_score = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (probabilities[i] == 0) continue;
    const std::uint32_t bits = ops::random_bits(row.seed, row.output.size(), static_cast<std::uint32_t>(i));
    const double score =
        (static_cast<double>(logits[i]) - max) / static_cast<double>(row.params.temperature) + ops::gumbel(bits);
    if (best >= 0 && score <= best_score) continue;
    best = static_cast<std::int32_t>(i);
    best_score = score;
  }
  return best;
}

}  // namespace deltaic::test

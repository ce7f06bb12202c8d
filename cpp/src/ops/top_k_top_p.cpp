#include "cpp/src/ops/top_k_top_p.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpp/src/ops/logits_row.h"

namespace deltaic::ops {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The smallest float >= value.
float round_up(double value) {
  const auto nearest = static_cast<float>(value);
  return static_cast<double>(nearest) < value ? std::nextafter(nearest, kInfinity) : nearest;
}

void shrink_to_best(std::vector<Candidate>& candidates, std::size_t count) {
  if (candidates.size() <= count) return;
  const auto last = candidates.begin() + static_cast<std::ptrdiff_t>(count) - 1;
  std::nth_element(candidates.begin(), last, candidates.end(), is_better);
  candidates.resize(count);
}

// Probabilities up to a common factor: exp((logit - max) / temperature).
class Weights {
 public:
  Weights(float max_logit, float temperature) : max_(max_logit), temperature_(temperature) {}
  double operator()(const Candidate& c) const { return std::exp((c.logit - max_) / temperature_); }
  double sum(std::span<const Candidate> candidates) const {
    double total = 0;
    for (const Candidate& c : candidates) total += (*this)(c);
    return total;
  }

 private:
  double max_, temperature_;
};

// Shrinks `candidates` to the shortest beginning of their order whose share of `total` reaches top_p. Halves the part
// in which the end lies, so that little is sorted.
void keep_top_p(std::vector<Candidate>& candidates, const Weights& weights, double total, float top_p) {
  constexpr std::ptrdiff_t kSortedWhole = 64;
  const auto reaches = [&](double weight) { return static_cast<float>(weight / total) >= top_p; };
  double before = 0;  // weight of [begin(), first)
  auto first = candidates.begin(), last = candidates.end();
  while (last - first > kSortedWhole) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, is_better);
    const double weight = weights.sum(std::span<const Candidate>(first, middle));
    if (reaches(before + weight)) {
      last = middle;
    } else {
      before += weight;
      first = middle;
    }
  }
  std::sort(first, last, is_better);
  while (first != last) {
    before += weights(*first++);
    if (reaches(before)) break;
  }
  candidates.erase(first, candidates.end());
}

// A logit that no token of the top-p set is below: the tokens under `average` weight (1 - top_p) * total / vocab_size
// weigh less than 1 - top_p together. Half of that leaves room for rounding.
float top_p_threshold(float max_logit, float temperature, float top_p, double total, std::size_t vocab_size) {
  const double average = 0.5 * (1.0 - static_cast<double>(top_p)) * total / static_cast<double>(vocab_size);
  return static_cast<float>(max_logit + static_cast<double>(temperature) * std::log(average));
}

}  // namespace

std::vector<Candidate> select_best(std::span<const float> logits, std::size_t count, float lowest) {
  constexpr std::size_t kBlock = 32;
  std::vector<Candidate> best;
  if (count == 0) return best;
  const std::size_t capacity = std::min(std::max(2 * count, count + 256), logits.size() + 1);
  // Only what is above can still be among the best: later ids lose to earlier ones where logits are equal.
  float above = std::nextafter(lowest, -kInfinity);
  const auto visit = [&](std::size_t i) {
    if (!(logits[i] > above)) return;
    best.push_back({logits[i], static_cast<std::int32_t>(i)});
    if (best.size() < capacity) return;
    shrink_to_best(best, count);
    above = best.back().logit;
  };
  std::size_t i = 0;
  for (; i + kBlock <= logits.size(); i += kBlock) {
    std::int32_t any = 0;
    for (std::size_t j = 0; j < kBlock; ++j) any |= logits[i + j] > above;
    if (any == 0) continue;
    for (std::size_t j = 0; j < kBlock; ++j) visit(i + j);
  }
  for (; i < logits.size(); ++i) visit(i);
  shrink_to_best(best, count);
  return best;
}

float min_p_threshold(float max_logit, float temperature, float min_p) {
  if (min_p <= 0.0F) return -kInfinity;
  return round_up(max_logit + static_cast<double>(temperature) * std::log(static_cast<double>(min_p)));
}

bool has_top_k(const SamplingParams& params, std::size_t vocab_size) {
  return params.top_k > 0 && static_cast<std::size_t>(params.top_k) < vocab_size;
}

bool has_top_p(const SamplingParams& params) { return params.top_p < 1.0F; }

std::vector<Candidate> filter_candidates(std::span<const float> logits, float max_logit, const SamplingParams& params) {
  const float lowest = min_p_threshold(max_logit, params.temperature, params.min_p);
  const Weights weights(max_logit, params.temperature);
  if (has_top_k(params, logits.size())) {
    std::vector<Candidate> best = select_best(logits, static_cast<std::size_t>(params.top_k), lowest);
    if (has_top_p(params)) keep_top_p(best, weights, weights.sum(best), params.top_p);
    return best;
  }
  if (!has_top_p(params)) return select_best(logits, logits.size(), lowest);
  const double total = sum_exp(logits, max_logit, 1.0F / params.temperature, lowest);
  const float threshold = top_p_threshold(max_logit, params.temperature, params.top_p, total, logits.size());
  std::vector<Candidate> best = select_best(logits, logits.size(), std::max(lowest, threshold));
  keep_top_p(best, weights, total, params.top_p);
  return best;
}

}  // namespace deltaic::ops

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "cpp/src/ops/logits_row.h"
#include "cpp/src/ops/top_k_top_p.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using ops::Candidate;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::int32_t> sorted_ids(std::vector<Candidate> candidates) {
  std::sort(candidates.begin(), candidates.end(), ops::is_better);
  std::vector<std::int32_t> ids;
  for (const Candidate& c : candidates) ids.push_back(c.token_id);
  return ids;
}

std::vector<std::int32_t> kept(const std::vector<float>& logits, const SamplingParams& params) {
  return sorted_ids(ops::filter_candidates(logits, *std::max_element(logits.begin(), logits.end()), params));
}

std::vector<float> make_logits(const char* shape, std::size_t size) {
  std::vector<float> logits = test::random_logits(size, 21);
  const std::string_view name(shape);
  if (name == "rising") std::sort(logits.begin(), logits.end());
  if (name == "falling") std::sort(logits.rbegin(), logits.rend());
  if (name == "ties")
    for (float& logit : logits) logit = std::round(logit / 2);
  if (name == "equal") logits.assign(size, 1.5F);
  if (name == "masked")
    for (std::size_t i = 0; i + 1 < size; i += 2) logits[i] = -kInfinity;
  return logits;
}

}  // namespace

TEST_CASE("select_best equals the beginning of a full sort, whatever the order of the logits") {
  for (const char* shape : {"random", "rising", "falling", "ties", "equal", "masked"})
    for (const std::size_t size : {1U, 2U, 31U, 32U, 33U, 700U, 20000U})
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{300}, size / 2, size})
        for (const float lowest : {-kInfinity, -1.0F, 2.0F}) {
          CAPTURE(shape);
          CAPTURE(size);
          CAPTURE(count);
          CAPTURE(lowest);
          const std::vector<float> logits = make_logits(shape, size);
          std::vector<Candidate> expected;
          for (std::size_t i = 0; i < size; ++i)
            if (logits[i] >= lowest && logits[i] > -kInfinity)
              expected.push_back({logits[i], static_cast<std::int32_t>(i)});
          std::sort(expected.begin(), expected.end(), ops::is_better);
          expected.resize(std::min(count, expected.size()));
          std::vector<Candidate> best = ops::select_best(logits, count, lowest);
          std::sort(best.begin(), best.end(), ops::is_better);
          CHECK(best == expected);
        }
}

TEST_CASE("the filters keep what the slow reference keeps") {
  std::mt19937 rng(5);
  const auto real = [&](float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng); };
  for (int trial = 0; trial < 400; ++trial) {
    CAPTURE(trial);
    const std::size_t size = 1 + rng() % 3000;
    test::OwnedRow row{.logits = test::random_logits(size, rng(), real(0.1F, 8.0F))};
    row.params = {.temperature = real(0.05F, 2.0F), .top_p = trial % 3 == 0 ? 1.0F : real(0.01F, 0.9999F)};
    row.params.top_k = trial % 4 < 2 ? 0 : static_cast<int>(1 + rng() % size);
    row.params.min_p = trial % 5 < 3 ? 0.0F : real(0.0F, 0.2F);
    const std::vector<double> probabilities = test::reference_probabilities(row);
    std::vector<Candidate> expected;
    for (std::size_t i = 0; i < size; ++i)
      if (probabilities[i] > 0) expected.push_back({row.logits[i], static_cast<std::int32_t>(i)});
    CHECK(kept(row.logits, row.params) == sorted_ids(expected));
  }
}

TEST_CASE("top-p keeps the smallest set that reaches the mass, exactly, the lower ids first among equals") {
  const std::vector<float> ten(10, 3.0F);
  for (int count = 1; count <= 10; ++count) {
    // count / 10 is reached by exactly `count` tokens, though its f32 value may lie above or below.
    std::vector<std::int32_t> first(static_cast<std::size_t>(count));
    std::iota(first.begin(), first.end(), 0);
    CHECK(kept(ten, {.top_p = static_cast<float>(count) / 10}) == first);
  }
  CHECK(kept(ten, {.top_p = 1e-30F}) == std::vector<std::int32_t>{0});
  CHECK(kept(ten, {.top_p = 0.31F}) == std::vector<std::int32_t>{0, 1, 2, 3});
  CHECK(kept({0, 2, 1, 2, 1}, {.top_p = 1e-6F}) == std::vector<std::int32_t>{1});
  CHECK(kept(std::vector<float>(4096, 0.0F), {.top_p = 0.5F}).size() == 2048);
  CHECK(kept(std::vector<float>(4096, 0.0F), {.top_p = 0.5F, .top_k = 1024}).size() == 512);
}

TEST_CASE("top-k keeps exactly k, the lower ids first among equals") {
  CHECK(kept({1, 2, 2, 2, 0}, {.top_k = 2}) == std::vector<std::int32_t>{1, 2});
  CHECK(kept({1, 2, 2, 2, 0}, {.top_k = 4}) == std::vector<std::int32_t>{1, 2, 3, 0});
  CHECK(kept({-kInfinity, 1, -kInfinity}, {.top_k = 2}) == std::vector<std::int32_t>{1});
}

TEST_CASE("min_p is relative to the likeliest token, after the temperature") {
  const std::vector<float> logits{0.0F, std::log(0.5F), std::log(0.25F), 0.0F};
  CHECK(kept(logits, {.min_p = 0.3F}) == std::vector<std::int32_t>{0, 3, 1});
  CHECK(kept(logits, {.temperature = 2.0F, .min_p = 0.3F}) == std::vector<std::int32_t>{0, 3, 1, 2});
  CHECK(kept(logits, {.min_p = 1.0F}) == std::vector<std::int32_t>{0, 3});
  CHECK(kept(logits, {.top_k = 1, .min_p = 0.1F}) == std::vector<std::int32_t>{0});
}

TEST_CASE("sum_exp is good to 1e-7 a term") {
  for (const std::size_t size : {1U, 15U, 16U, 17U, 1000U, 248320U}) {
    const std::vector<float> logits = test::random_logits(size, 9);
    const float max = *std::max_element(logits.begin(), logits.end());
    double expected = 0, expected_above = 0;
    for (const float x : logits) {
      const double term = std::exp(static_cast<double>(x) - static_cast<double>(max));
      expected += term;
      if (x >= 0.5F) expected_above += term;
    }
    CHECK(std::abs(ops::sum_exp(logits, max, 1.0F, -kInfinity) - expected) <= 2e-7 * expected);
    CHECK(std::abs(ops::sum_exp(logits, max, 1.0F, 0.5F) - expected_above) <= 2e-7 * expected_above);
  }
  // Each magnitude on its own, to the end of the range.
  for (float x = 0.0F; x > -87.0F; x -= 0.37F) {
    const double expected = std::exp(static_cast<double>(x));
    CHECK(std::abs(ops::sum_exp(std::vector<float>{x}, 0.0F, 1.0F, -kInfinity) - expected) <= 2e-7 * expected);
  }
  CHECK(ops::sum_exp(std::vector<float>{0.0F, -200.0F, -kInfinity}, 0.0F, 1.0F, -kInfinity) == 1.0);
}

TEST_CASE("row_max finds the largest element and what is not finite, at every index") {
  for (std::size_t size = 1; size < 70; ++size)
    for (std::size_t at = 0; at < size; ++at) {
      std::vector<float> logits(size, -1.0F);
      logits[at] = 2.0F;
      CHECK(ops::row_max(logits).value == 2.0F);
      CHECK(ops::row_max(logits).is_finite);
      CHECK(ops::first_index_of(logits, 2.0F) == static_cast<std::int32_t>(at));
      CHECK(ops::count_above(logits, -1.0F) == 1);
      CHECK(ops::count_above(logits, 2.0F) == 0);
      logits[at] = -kInfinity;
      CHECK(ops::row_max(logits).is_finite == (size > 1));
      for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        logits[at] = bad;
        CHECK_FALSE(ops::row_max(logits).is_finite);
      }
    }
}

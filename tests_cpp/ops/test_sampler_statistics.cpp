#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "cpp/src/ops/gumbel_argmax.h"
#include "cpp/src/ops/random.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using test::OwnedRow;

namespace {

// Chi-square of `counts` against `probabilities`, in standard deviations from its mean: within +-4 for honest draws.
// Cells with fewer than 5 expected draws are put together. A draw of what has probability 0 is an error.
double chi_square_sigmas(const std::vector<int>& counts, const std::vector<double>& probabilities) {
  const double num_draws = std::accumulate(counts.begin(), counts.end(), 0.0);
  double chi_square = 0, rest_count = 0, rest_expected = 0;
  int num_cells = 0;
  const auto add = [&](double count, double expected) {
    chi_square += (count - expected) * (count - expected) / expected;
    ++num_cells;
  };
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double expected = probabilities[i] * num_draws;
    if (expected == 0) REQUIRE(counts[i] == 0);
    if (expected >= 5) {
      add(counts[i], expected);
    } else {
      rest_count += counts[i];
      rest_expected += expected;
    }
  }
  if (rest_expected > 1) add(rest_count, rest_expected);
  REQUIRE(num_cells > 1);
  const double freedom = num_cells - 1;
  return (chi_square - freedom) / std::sqrt(2 * freedom);
}

// `by_position`: one seed, positions 0, 1, 2, ...; else one position, seeds 0, 1, 2, ...
std::vector<int> count_draws(OwnedRow row, int num_draws, bool by_position) {
  std::vector<int> counts(row.logits.size());
  std::vector<std::int32_t> output(static_cast<std::size_t>(num_draws));
  for (int i = 0; i < num_draws; ++i) {
    ops::SamplerRow view = row.view();
    if (by_position) {
      view.output_token_ids = std::span(output).first(static_cast<std::size_t>(i));
    } else {
      view.seed = static_cast<std::uint64_t>(i);
    }
    ++counts[static_cast<std::size_t>(ops::sample({}, {&view, 1}).front().token_id)];
  }
  return counts;
}

}  // namespace

TEST_CASE("philox gives the known answers of its authors") {
  const auto words = [](ops::PhiloxBlock counter, std::uint32_t key0, std::uint32_t key1) {
    const ops::PhiloxBlock block = ops::philox(counter, key0, key1);
    return std::vector<std::uint32_t>(block.word, block.word + 4);
  };
  CHECK(words({{0, 0, 0, 0}}, 0, 0) == std::vector<std::uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(words({{~0U, ~0U, ~0U, ~0U}}, ~0U, ~0U) ==
        std::vector<std::uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0) ==
        std::vector<std::uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("the noise is finite at both ends and never rises with the bits") {
  CHECK(ops::gumbel(0) <= ops::kMaxGumbel);
  CHECK(ops::gumbel(0) > ops::kMaxGumbel - 1e-5);
  CHECK(std::isfinite(ops::gumbel(~0U)));
  double last = ops::gumbel(0);
  for (std::uint64_t bits = 1; bits <= 0xFFFFFFFFU; bits = bits * 2 + 1) {
    CHECK(ops::gumbel(static_cast<std::uint32_t>(bits)) < last);
    last = ops::gumbel(static_cast<std::uint32_t>(bits));
  }
}

TEST_CASE("draws follow the exact distribution, over positions and over seeds") {
  struct Case {
    const char* name;
    std::size_t vocab_size;
    SamplingParams params;
  };
  const std::vector<Case> cases{
      {"temperature 1", 40, {}},
      {"temperature 0.6", 40, {.temperature = 0.6F}},
      {"large vocabulary", 3000, {.temperature = 1.5F}},
      {"top-k", 200, {.top_k = 20}},
      {"top-p", 200, {.top_p = 0.8F}},
      {"min-p", 200, {.min_p = 0.05F}},
      {"all", 200, {.temperature = 1.3F, .top_p = 0.9F, .top_k = 50, .min_p = 0.02F}},
      {"two tokens", 2, {.temperature = 2.0F}},
  };
  for (const Case& c : cases)
    for (const bool by_position : {true, false}) {
      CAPTURE(c.name);
      CAPTURE(by_position);
      const OwnedRow row{.logits = test::random_logits(c.vocab_size, 77, 1.5F), .params = c.params, .seed = 1234};
      const double sigmas = chi_square_sigmas(count_draws(row, 20000, by_position), test::reference_probabilities(row));
      CHECK(std::abs(sigmas) < 4);
    }
}

TEST_CASE("the test of the distribution sees a small bias") {
  const OwnedRow row{.logits = test::random_logits(40, 77, 1.5F), .seed = 1234};
  OwnedRow colder = row;
  colder.params.temperature = 0.9F;
  CHECK(chi_square_sigmas(count_draws(row, 20000, true), test::reference_probabilities(colder)) > 10);
}

TEST_CASE("draws at neighbouring positions, seeds and ids are independent") {
  constexpr std::size_t kVocab = 8;
  const std::vector<double> uniform(kVocab * kVocab, 1.0 / (kVocab * kVocab));
  const std::vector<float> logits(kVocab, 0.0F);
  const auto token = [&](std::uint64_t seed, std::uint64_t position) {
    return static_cast<std::size_t>(ops::draw(logits, 0.0F, 1.0F, -1.0F, {seed, position}));
  };
  std::vector<int> positions(kVocab * kVocab), seeds(kVocab * kVocab);
  for (std::uint64_t i = 0; i < 20000; ++i) {
    ++positions[token(5, 2 * i) * kVocab + token(5, 2 * i + 1)];
    ++seeds[token(2 * i, 3) * kVocab + token(2 * i + 1, 3)];
  }
  CHECK(std::abs(chi_square_sigmas(positions, uniform)) < 4);
  CHECK(std::abs(chi_square_sigmas(seeds, uniform)) < 4);
}

TEST_CASE("both ways to draw give the token of the plain argmax") {
  for (std::uint32_t trial = 0; trial < 300; ++trial) {
    const std::size_t size = 1 + trial * 17;
    for (const float temperature : {0.01F, 0.7F, 2.0F}) {
      const OwnedRow row{.logits = test::random_logits(size, trial, 0.2F + 0.05F * static_cast<float>(trial)),
                         .params = {.temperature = temperature},
                         .output = {1, 2, 3},
                         .seed = trial * 0x123456789ULL};
      const float max = *std::max_element(row.logits.begin(), row.logits.end());
      const std::int32_t expected = test::reference_token(row);
      std::vector<ops::Candidate> candidates;
      for (std::size_t i = size; i-- > 0;) candidates.push_back({row.logits[i], static_cast<std::int32_t>(i)});
      CHECK(ops::draw(row.logits, max, temperature, -1e9F, {row.seed, 3}) == expected);
      CHECK(ops::draw(candidates, max, temperature, {row.seed, 3}) == expected);
    }
  }
}

TEST_CASE("two tokens with the same score: the lower id wins") {
  constexpr std::uint32_t kVocab = 248320;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> words;  // bits, id
  words.reserve(kVocab);
  for (std::uint32_t id = 0; id < kVocab; ++id) words.emplace_back(ops::random_bits(1, 0, id), id);
  std::sort(words.begin(), words.end());
  int num_pairs = 0;
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i].first != words[i - 1].first) continue;
    const auto low = static_cast<std::int32_t>(words[i - 1].second), high = static_cast<std::int32_t>(words[i].second);
    const std::vector<ops::Candidate> rising{{1.0F, low}, {1.0F, high}}, falling{{1.0F, high}, {1.0F, low}};
    CHECK(ops::draw(rising, 1.0F, 1.0F, {1, 0}) == low);
    CHECK(ops::draw(falling, 1.0F, 1.0F, {1, 0}) == low);
    std::vector<float> logits(kVocab, -std::numeric_limits<float>::infinity());
    logits[words[i - 1].second] = logits[words[i].second] = 1.0F;
    CHECK(ops::draw(logits, 1.0F, 1.0F, -1.0F, {1, 0}) == low);
    ++num_pairs;
  }
  CHECK(num_pairs > 0);
}

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/ops/logits_processors.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using test::OwnedRow;

namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

std::vector<float> penalised(OwnedRow row) {
  std::vector<std::int32_t> counts;
  ops::apply_penalties(row.logits, row.params, row.prompt, row.output, counts);
  for (const std::int32_t count : counts) CHECK(count == 0);
  return row.logits;
}

}  // namespace

TEST_CASE("allowed ids mask the others; an empty list and duplicates change nothing") {
  std::vector<float> logits{1, 2, kMasked, 4};
  ops::mask_all_but(logits, {});
  CHECK(logits == std::vector<float>{1, 2, kMasked, 4});
  ops::mask_all_but(logits, std::vector<int>{3, 1, 2, 3});
  CHECK(logits == std::vector<float>{kMasked, 2, kMasked, 4});
  CHECK_THROWS_AS(ops::mask_all_but(logits, std::vector<int>{4}), InvalidArgument);
  CHECK_THROWS_AS(ops::mask_all_but(logits, std::vector<int>{-1}), InvalidArgument);
}

TEST_CASE("a bad word masks its last token when the rest was just generated") {
  const auto masked = [](const std::vector<std::vector<int>>& words, const std::vector<std::int32_t>& output) {
    std::vector<float> logits(6, 1.0F);
    ops::mask_bad_words(logits, words, output);
    std::vector<int> ids;
    for (int id = 0; id < 6; ++id)
      if (logits[static_cast<std::size_t>(id)] == kMasked) ids.push_back(id);
    return ids;
  };
  CHECK(masked({{3}}, {}) == std::vector<int>{3});
  CHECK(masked({{1, 2, 3}}, {1, 2}) == std::vector<int>{3});
  CHECK(masked({{1, 2, 3}}, {2}).empty());        // shorter than the beginning
  CHECK(masked({{1, 2, 3}}, {1, 2, 0}).empty());  // no longer the newest
  CHECK(masked({{1, 2, 3}}, {0, 1, 2, 1, 2}) == std::vector<int>{3});
  CHECK(masked({{2, 2, 2}}, {2, 2}) == std::vector<int>{2});
  CHECK(masked({{1, 4}, {0, 1, 5}, {2}}, {0, 1}) == std::vector<int>{2, 4, 5});
  CHECK_THROWS_AS(masked({{}}, {}), InvalidArgument);
  CHECK_THROWS_AS(masked({{6}}, {}), InvalidArgument);
}

TEST_CASE("the repetition penalty is over prompt and output, once a token; the other two are over the output") {
  const OwnedRow row{.logits = {2, -2, 2, -2, kMasked, 0}, .prompt = {0, 0, 1}, .output = {2, 2, 3, 0, 4}};
  OwnedRow repetition = row;
  repetition.params.repetition_penalty = 2;
  CHECK(penalised(repetition) == std::vector<float>{1, -4, 1, -4, kMasked, 0});
  OwnedRow frequency = row;
  frequency.params.frequency_penalty = 0.5F;
  CHECK(penalised(frequency) == std::vector<float>{1.5F, -2, 1, -2.5F, kMasked, 0});
  OwnedRow presence = row;
  presence.params.presence_penalty = -0.5F;
  CHECK(penalised(presence) == std::vector<float>{2.5F, -2, 2.5F, -1.5F, kMasked, 0});
  CHECK(penalised(row) == row.logits);
}

TEST_CASE("process_logits agrees with the slow reference") {
  std::mt19937 rng(11);
  for (int trial = 0; trial < 200; ++trial) {
    const auto id = [&] { return static_cast<int>(rng() % 200); };
    const auto real = [&] { return std::uniform_real_distribution<float>(-2, 2)(rng); };
    OwnedRow row{.logits = test::random_logits(200, rng())};
    for (int i = 0; i < trial; ++i) row.prompt.push_back(id()), row.output.push_back(id() / 4);
    row.params = {.presence_penalty = real(), .frequency_penalty = real(), .repetition_penalty = 2.5F + real()};
    row.params.logit_bias = {{id(), real()}, {id(), real()}};
    row.params.min_tokens = 100;
    row.params.stop_token_ids = {id(), id()};
    row.params.bad_words = {{id() / 4, id()}, {id()}};
    if (trial % 2 == 0)
      for (int i = 0; i < 150; ++i) row.params.allowed_token_ids.push_back(id());
    std::vector<float> logits = row.logits;
    std::vector<std::int32_t> counts;
    ops::process_logits(logits, row.params, row.prompt, row.output, counts);
    const std::vector<float> expected = test::reference_processed(row);
    for (std::size_t i = 0; i < logits.size(); ++i) {
      CAPTURE(i);
      if (expected[i] == kMasked) {
        CHECK(logits[i] == kMasked);
      } else {
        CHECK(std::abs(logits[i] - expected[i]) <= 1e-6F * (1 + std::abs(expected[i])));
      }
    }
  }
}

TEST_CASE("needs_processing is false only where nothing would change") {
  CHECK_FALSE(ops::needs_processing({}, 0));
  CHECK_FALSE(ops::needs_processing({.top_p = 0.5F, .top_k = 3, .min_p = 0.1F, .stop_token_ids = {1}}, 0));
  CHECK(ops::needs_processing({.presence_penalty = 1}, 0));
  CHECK(ops::needs_processing({.frequency_penalty = 1}, 0));
  CHECK(ops::needs_processing({.repetition_penalty = 0.5F}, 0));
  CHECK(ops::needs_processing({.logit_bias = {{0, 1.0F}}}, 0));
  CHECK(ops::needs_processing({.allowed_token_ids = {0}}, 0));
  CHECK(ops::needs_processing({.bad_words = {{0}}}, 0));
  CHECK(ops::needs_processing({.min_tokens = 3, .stop_token_ids = {1}}, 2));
  CHECK_FALSE(ops::needs_processing({.min_tokens = 3, .stop_token_ids = {1}}, 3));
}

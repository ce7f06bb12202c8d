#include "cpp/src/ops/verify_drafts.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <deltaic/error.h>

#include "cpp/src/core/thread_pool.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using test::OwnedRow;
using Tokens = std::vector<std::int32_t>;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A request with `drafts` behind its output, and the logits of all its positions.
struct Request {
  std::vector<std::vector<float>> logits{};  // one row a position, 1 + drafts
  SamplingParams params{};
  Tokens prompt{}, output{}, drafts{};
  std::uint64_t seed = 0;

  // What is sampled at position j when the drafts before it stand.
  OwnedRow position(std::size_t j) const {
    OwnedRow row{.logits = logits[j], .params = params, .prompt = prompt, .output = output, .seed = seed};
    row.output.insert(row.output.end(), drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(j));
    return row;
  }
};

// Verifies requests together.
std::vector<ops::VerifiedTokens> verify(const std::vector<Request>& requests, ThreadPool* threads = nullptr) {
  std::vector<std::vector<float>> logits;
  std::vector<Tokens> outputs;
  for (const Request& request : requests) {
    logits.emplace_back();
    for (const auto& row : request.logits) logits.back().insert(logits.back().end(), row.begin(), row.end());
    outputs.push_back(request.output);
    outputs.back().insert(outputs.back().end(), request.drafts.begin(), request.drafts.end());
  }
  std::vector<ops::DraftRow> rows;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto num_rows = static_cast<std::int64_t>(requests[i].logits.size());
    rows.push_back({.logits = make_view(logits[i].data(), DType::f32,
                                        {num_rows, static_cast<std::int64_t>(logits[i].size()) / num_rows}),
                    .params = &requests[i].params,
                    .prompt_token_ids = requests[i].prompt,
                    .output_token_ids = outputs[i],
                    .num_drafts = static_cast<int>(requests[i].drafts.size()),
                    .seed = requests[i].seed});
  }
  return ops::verify_drafts({.device = {}, .stream = {}, .threads = threads}, rows);
}

// Logits whose largest is that of `best`.
std::vector<float> peaked(std::int32_t best, std::size_t vocab_size = 100) {
  std::vector<float> logits(vocab_size, 0.0F);
  logits[static_cast<std::size_t>(best)] = 5.0F;
  return logits;
}

SamplingParams greedy() { return {.temperature = 0.0F}; }

}  // namespace

TEST_CASE("a greedy row gives the argmax of each position up to the first wrong draft") {
  const auto tokens = [](Tokens drafts) {
    Request request{.params = greedy(), .drafts = std::move(drafts)};
    for (const std::int32_t best : {5, 9, 7, 3})
      if (request.logits.size() <= request.drafts.size()) request.logits.push_back(peaked(best));
    return verify({request}).front().token_ids;
  };
  CHECK(tokens({}) == Tokens{5});
  CHECK(tokens({5, 9, 7}) == Tokens{5, 9, 7, 3});
  CHECK(tokens({5, 9, 8}) == Tokens{5, 9, 7});
  CHECK(tokens({5, 8, 7}) == Tokens{5, 9});
  CHECK(tokens({4, 9, 7}) == Tokens{5});
}

TEST_CASE("a placeholder draft is never accepted nor read") {
  // D55: drafts [5, -1, 7] with target argmax [5, 9, 7]; what is behind the placeholder does not matter.
  const std::vector<float> poison(100, kNaN);
  const Request request{.logits = {peaked(5), peaked(9), poison, poison}, .params = greedy(), .drafts = {5, -1, 7}};
  CHECK(verify({request}).front().token_ids == Tokens{5, 9});
  Request penalised = request;
  penalised.params = {.temperature = 1.0F, .repetition_penalty = 1.2F, .bad_words = {{1, 2}, {3}}};
  penalised.drafts = {-1, -1, -1};
  penalised.logits[0] = peaked(0, 100);
  CHECK(verify({penalised}).front().token_ids.size() == 1);
}

TEST_CASE("with any parameters and any drafts the tokens are those of one sample after another") {
  std::mt19937 random(3);
  const auto below = [&](int n) { return static_cast<std::int32_t>(random() % static_cast<unsigned>(n)); };
  constexpr int kVocab = 12;
  std::vector<Request> requests;
  std::vector<Tokens> expected;
  std::vector<int> num_of_length(5, 0);
  for (int trial = 0; trial < 2000; ++trial) {
    SamplingParams params{.temperature = trial % 5 == 0 ? 0.0F : 0.8F};
    if (trial % 2 == 0) params.top_k = 5;
    if (trial % 3 == 0) params.top_p = 0.9F;
    if (trial % 7 == 0) params.min_p = 0.05F;
    if (trial % 4 == 1) params.repetition_penalty = 1.3F, params.presence_penalty = 0.4F;
    if (trial % 4 == 2) params.frequency_penalty = 0.7F, params.logit_bias = {{2, 1.5F}};
    if (trial % 6 == 1) params.min_tokens = 4, params.stop_token_ids = {1, 4};
    if (trial % 6 == 2) params.bad_words = {{3}, {1, 2}, {5, 6, 7}};
    if (trial % 11 == 0) params.allowed_token_ids = {0, 1, 2, 8};
    Request request{.params = params, .prompt = {1, 2, 3}, .seed = random()};
    for (int i = below(4); i > 0; --i) request.output.push_back(below(kVocab));
    const int num_drafts = below(5);
    for (int j = 0; j <= num_drafts; ++j)
      request.logits.push_back(test::random_logits(kVocab, static_cast<std::uint32_t>(random()), 1.5F));
    // Mostly right drafts, so that all lengths are seen.
    Tokens chosen;
    for (std::size_t j = 0; j < request.logits.size(); ++j) {
      chosen.push_back(test::sample_one(request.position(j)).token_id);
      if (j + 1 == request.logits.size()) break;
      request.drafts.push_back(below(4) == 0 ? below(kVocab) : chosen.back());
      if (request.drafts.back() != chosen.back()) {
        while (request.drafts.size() + 1 < request.logits.size()) request.drafts.push_back(below(kVocab + 1) - 1);
        break;
      }
    }
    ++num_of_length[chosen.size() - 1];
    expected.push_back(std::move(chosen));
    requests.push_back(std::move(request));
  }
  for (const int count : num_of_length) CHECK(count > 30);
  ThreadPool threads(3);
  const auto together = verify(requests, &threads);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK(together[i].token_ids == expected[i]);
    if (i % 50 == 0) CHECK(verify({requests[i]}).front().token_ids == expected[i]);
  }
}

TEST_CASE("min_tokens masks stop ids at exactly the output positions before it") {
  // D58: min_tokens 5 with three drafts: the stop id can come at output position 5, no earlier.
  for (std::size_t num_output = 0; num_output < 8; ++num_output) {
    Request request{.params = greedy(), .output = Tokens(num_output, 50)};
    request.params.min_tokens = 5;
    request.params.stop_token_ids = {9};
    std::vector<float> logits = peaked(9);
    logits[60] = 4.0F;
    request.logits.assign(4, logits);
    request.drafts = {60, 60, 60};
    const Tokens tokens = verify({request}).front().token_ids;
    CAPTURE(num_output);
    const std::size_t num_before = num_output < 5 ? 5 - num_output : 0;  // positions that must not stop
    if (num_before >= 4) {
      CHECK(tokens == Tokens{60, 60, 60, 60});
    } else {
      Tokens wanted(num_before, 60);
      wanted.push_back(9);
      CHECK(tokens == wanted);
    }
  }
}

TEST_CASE("bad words see the drafts before their position") {
  // D83: committed ..., 10, 11; drafts 12, 13.
  SamplingParams params = greedy();
  params.bad_words = {{12, 13, 40}, {11, 12, 30}, {11, 11, 50}, {10, 11, 60}};
  const auto token_at = [&](std::size_t position, std::int32_t preferred) {
    Request request{.params = params, .output = {9, 10, 11}, .drafts = {12, 13}};
    for (std::size_t j = 0; j < 3; ++j) {
      request.logits.push_back(peaked(j == 0 ? 12 : j == 1 ? 13 : 99));
      if (j == position) request.logits.back()[static_cast<std::size_t>(preferred)] = 9.0F;
    }
    return verify({request}).front().token_ids[position];
  };
  const std::int32_t free_choice[] = {12, 13, 99};
  for (std::size_t position = 0; position < 3; ++position)
    for (const std::int32_t id : {40, 30, 50, 60}) {
      CAPTURE(position);
      CAPTURE(id);
      const bool is_masked = (position == 2 && id == 40) || (position == 1 && id == 30) || (position == 0 && id == 60);
      CHECK(token_at(position, id) == (is_masked ? free_choice[position] : id));
    }
}

TEST_CASE("each emitted token has its log probabilities, those of sampling alone") {
  // D88: 0, 1 and 5 of them, at every draft position, next to rows without.
  for (const int num_logprobs : {0, 1, 5}) {
    Request request{.params = {.temperature = 0.0F, .logprobs = num_logprobs}, .drafts = {5, 9, 8}};
    for (const std::int32_t best : {5, 9, 7, 3}) {
      request.logits.push_back(test::random_logits(100, static_cast<std::uint32_t>(best), 0.5F));
      request.logits.back()[static_cast<std::size_t>(best)] = 5.0F;
    }
    Request plain = request;
    plain.params.logprobs.reset();
    const auto results = verify({plain, request, plain});
    CHECK(results[1].token_ids == Tokens{5, 9, 7});
    CHECK(results[0].logprobs.empty());
    REQUIRE(results[1].logprobs.size() == 3);
    for (std::size_t j = 0; j < 3; ++j) {
      const auto alone = *test::sample_one(request.position(j)).logprobs;
      CHECK(results[1].logprobs[j].token_ids == alone.token_ids);
      CHECK(results[1].logprobs[j].logprobs == alone.logprobs);
      CHECK(results[1].logprobs[j].rank == alone.rank);
    }
  }
}

TEST_CASE("a row that is not finite is reported and harms no other") {
  // D56
  const std::vector<float> poison(100, kNaN);
  const Request good{.logits = {peaked(5), peaked(9)}, .params = greedy(), .drafts = {5}};
  Request bad = good;
  bad.logits[0] = poison;
  Request bad_behind = good;  // it counts, as the draft is right
  bad_behind.logits[1] = poison;
  Request unreached = bad_behind;  // a wrong draft: the position behind it decides nothing
  unreached.drafts = {6};
  const auto results = verify({good, bad, good, bad_behind, unreached});
  CHECK(results[0].token_ids == Tokens{5, 9});
  CHECK(results[2].token_ids == Tokens{5, 9});
  for (const std::size_t i : {1U, 3U}) {
    CHECK_FALSE(results[i].is_finite);
    CHECK(results[i].token_ids.empty());
  }
  CHECK(results[4].is_finite);
  CHECK(results[4].token_ids == Tokens{5});
}

TEST_CASE("rows beyond 2^31 logits are reached") {
  // D57: 16,384 rows of 151,936; only the pages of the last two are ever touched.
  constexpr std::int64_t kRows = 16384, kVocab = 151936;
  constexpr std::size_t kBytes = kRows * kVocab * sizeof(float);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  const TensorView all = make_view(memory, DType::f32, {kRows, kVocab});
  float* logits = all.as<float>();
  logits[(kRows - 2) * kVocab + 150000] = 3.0F;
  logits[(kRows - 1) * kVocab + 151935] = 3.0F;
  const SamplingParams params = greedy();
  const Tokens drafts{150000};
  const ops::DraftRow row{
      .logits = all.slice(kRows - 2, kRows), .params = &params, .output_token_ids = drafts, .num_drafts = 1};
  CHECK(ops::verify_drafts({}, {&row, 1}).front().token_ids == Tokens{150000, 151935});
  munmap(memory, kBytes);
}

TEST_CASE("the tokens of sampled rows follow the target distribution, whatever the drafts") {
  constexpr int kVocab = 8, kDraws = 20000;
  SamplingParams params{.temperature = 0.9F};
  params.top_k = 6;
  const OwnedRow first{.logits = test::random_logits(kVocab, 21, 1.2F), .params = params};
  const OwnedRow second{.logits = test::random_logits(kVocab, 22, 1.2F), .params = params};
  const auto p = test::reference_probabilities(first), q = test::reference_probabilities(second);
  for (const bool likely : {true, false}) {
    const auto by_probability = [](const std::vector<double>& x) {
      return static_cast<std::int32_t>(std::max_element(x.begin(), x.end()) - x.begin());
    };
    Request request{.logits = {first.logits, second.logits}, .params = params};
    request.drafts = {likely ? by_probability(p) : std::int32_t{5}};
    const auto draft = static_cast<std::size_t>(request.drafts[0]);
    std::vector<double> counts(kVocab, 0.0), behind(kVocab, 0.0);
    double num_accepted = 0;
    for (int i = 0; i < kDraws; ++i) {
      request.seed = static_cast<std::uint64_t>(i);
      const Tokens tokens = verify({request}).front().token_ids;
      ++counts[static_cast<std::size_t>(tokens[0])];
      if (tokens.size() == 2) ++behind[static_cast<std::size_t>(tokens[1])], ++num_accepted;
    }
    // A draft is accepted with its own probability, so no law is lost: within four standard deviations.
    CHECK(counts[draft] == num_accepted);
    const auto sigmas = [](const std::vector<double>& seen, const std::vector<double>& expected, double num_draws) {
      double chi_square = 0;
      int num_cells = 0;
      for (std::size_t i = 0; i < seen.size(); ++i) {
        if (expected[i] == 0) {
          REQUIRE(seen[i] == 0);
          continue;
        }
        const double mean = expected[i] * num_draws;
        chi_square += (seen[i] - mean) * (seen[i] - mean) / mean;
        ++num_cells;
      }
      return (chi_square - (num_cells - 1)) / std::sqrt(2.0 * (num_cells - 1));
    };
    CHECK(std::abs(sigmas(counts, p, kDraws)) < 4);
    if (num_accepted > 1000) CHECK(std::abs(sigmas(behind, q, num_accepted)) < 4);
    OwnedRow colder = first;
    colder.params.temperature = 0.8F;
    CHECK(sigmas(counts, test::reference_probabilities(colder), kDraws) > 10);  // the test sees a small bias
  }
}

TEST_CASE("a row that does not fit is refused") {
  const SamplingParams params = greedy();
  std::vector<float> logits(20, 0.0F);
  const Tokens output{1, 2};
  ops::DraftRow row{.logits = make_view(logits.data(), DType::f32, {2, 10}),
                    .params = &params,
                    .output_token_ids = output,
                    .num_drafts = 1};
  CHECK(ops::verify_drafts({}, {&row, 1}).size() == 1);
  row.num_drafts = 3;
  CHECK_THROWS_AS(ops::verify_drafts({}, {&row, 1}), InvalidArgument);
  row.num_drafts = 2;
  CHECK_THROWS_AS(ops::verify_drafts({}, {&row, 1}), InvalidArgument);
  row.num_drafts = -1;
  CHECK_THROWS_AS(ops::verify_drafts({}, {&row, 1}), InvalidArgument);
}

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using test::OwnedRow;
using test::random_logits;
using test::sample_one;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<std::int32_t> sample_all(std::vector<OwnedRow> rows, ThreadPool* threads = nullptr) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(rows.size());
  for (const ops::SampledToken& token : ops::sample({.threads = threads}, test::views_of(rows)))
    tokens.push_back(token.is_finite ? token.token_id : -1);
  return tokens;
}

// A row with a random set of parameters, every processor and filter on now and then.
OwnedRow random_row(std::uint32_t seed) {
  std::mt19937 rng(seed);
  const auto chance = [&](int one_in) { return rng() % static_cast<std::uint32_t>(one_in) == 0; };
  constexpr std::array<std::size_t, 9> kSizes{1, 2, 5, 31, 32, 33, 100, 1000, 3001};
  const std::size_t size = kSizes[rng() % kSizes.size()];
  const auto id = [&] { return static_cast<int>(rng() % size); };
  const auto real = [&](float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng); };
  OwnedRow row{.logits = random_logits(size, rng(), real(0.5F, 6.0F)), .seed = rng()};
  if (chance(4))  // ties
    for (float& logit : row.logits) logit = std::round(logit);
  if (chance(4))
    for (std::size_t i = 1; i < size; i += 3) row.logits[i] = -kInfinity;
  for (std::uint32_t i = rng() % 20; i > 0; --i) row.prompt.push_back(id());
  for (std::uint32_t i = rng() % 20; i > 0; --i) row.output.push_back(id());
  SamplingParams& p = row.params;
  p.temperature = chance(4) ? 0.0F : chance(4) ? 0.01F : real(0.1F, 2.0F);
  if (chance(2)) p.top_k = id() + 1;
  if (chance(2)) p.top_p = real(0.05F, 0.999F);
  if (chance(3)) p.min_p = real(0.0F, 1.0F);
  if (chance(3)) p.repetition_penalty = real(0.5F, 2.0F);
  if (chance(3)) p.frequency_penalty = real(-2.0F, 2.0F);
  if (chance(3)) p.presence_penalty = real(-2.0F, 2.0F);
  if (chance(3)) p.logit_bias = {{id(), real(-100.0F, 100.0F)}, {id(), 5.0F}};
  if (chance(4))
    for (int i = 0; i < 30; ++i) p.allowed_token_ids.push_back(id());
  if (chance(3)) {
    p.bad_words = {{id()}, {id(), id()}};
    if (!row.output.empty()) p.bad_words.push_back({row.output.back(), id()});
  }
  p.min_tokens = static_cast<int>(rng() % 20);
  p.stop_token_ids = {id(), id()};
  return row;
}

}  // namespace

TEST_CASE("sample agrees with the slow reference for every mix of parameters") {
  int num_finite = 0;
  for (std::uint32_t seed = 0; seed < 3000; ++seed) {
    CAPTURE(seed);
    const OwnedRow row = random_row(seed);
    const std::vector<float> processed = test::reference_processed(row);
    const bool is_finite = std::any_of(processed.begin(), processed.end(), [](float x) { return std::isfinite(x); });
    const ops::SampledToken sampled = sample_one(row);
    REQUIRE(sampled.is_finite == is_finite);
    if (is_finite) CHECK(sampled.token_id == test::reference_token(row));
    num_finite += is_finite;
  }
  CHECK(num_finite > 2000);
}

TEST_CASE("greedy takes the best token, the lowest id where two are equal") {
  OwnedRow row{.logits = {1, 5, -2, 5, 5}, .params = {.temperature = 0}};
  CHECK(sample_one(row).token_id == 1);
  row.logits.assign(1000, 0.25F);
  CHECK(sample_one(row).token_id == 0);
  row.logits[777] = 0.5F;
  CHECK(sample_one(row).token_id == 777);
}

TEST_CASE("order of steps: allowed ids, bad words, min_tokens, bias, penalties, then the choice") {
  SUBCASE("a bias lifts no masked token") {
    OwnedRow row{.logits = {0, 1, 2, 3}, .params = {.temperature = 0}};
    row.params.logit_bias = {{1, 100.0F}, {2, 100.0F}, {3, 100.0F}};
    row.params.bad_words = {{3}};
    row.params.min_tokens = 1;
    row.params.stop_token_ids = {2};
    row.params.allowed_token_ids = {0, 2, 3};
    CHECK(sample_one(row).token_id == 0);
  }
  SUBCASE("the bias comes before the repetition penalty") {
    // (4 + 4) / 2 = 4 loses to 5; 4 / 2 + 4 = 6 would win.
    OwnedRow row{.logits = {4, 5}, .params = {.temperature = 0, .repetition_penalty = 2}, .prompt = {0}};
    row.params.logit_bias = {{0, 4.0F}};
    CHECK(sample_one(row).token_id == 1);
  }
  SUBCASE("the repetition penalty comes before the other two") {
    // 6 / 2 - 2 = 1 loses to 1.5; (6 - 2) / 2 = 2 would win.
    OwnedRow row{.logits = {6, 1.5F}, .output = {0}};
    row.params = {.temperature = 0, .presence_penalty = 1, .frequency_penalty = 1, .repetition_penalty = 2};
    CHECK(sample_one(row).token_id == 1);
  }
  SUBCASE("temperature comes before min_p and top-p") {
    // At temperature 2 the second token has 0.61 of the first one's probability, at 1 it has 0.37.
    OwnedRow row{.logits = {1, 0}, .params = {.temperature = 2, .min_p = 0.5F}};
    bool second = false;
    for (row.seed = 0; row.seed < 50; ++row.seed) second = second || sample_one(row).token_id == 1;
    CHECK(second);
  }
  SUBCASE("top-p sees what top-k left") {
    // Of all tokens the first has 0.4, of the first two 0.57.
    OwnedRow row{.logits = {std::log(0.4F), std::log(0.3F), std::log(0.3F)}};
    row.params = {.top_p = 0.5F, .top_k = 2};
    for (row.seed = 0; row.seed < 50; ++row.seed) CHECK(sample_one(row).token_id == 0);
  }
}

TEST_CASE("D81: a seeded row gives the same token alone, with unseeded companions, in any order, on any threads") {
  const OwnedRow seeded{.logits = random_logits(5000, 1), .output = {1, 2, 3}, .seed = 42};
  const std::int32_t alone = sample_one(seeded).token_id;
  std::mt19937_64 entropy(7);
  for (const int num_companions : {1, 7, 31}) {
    std::vector<OwnedRow> rows(static_cast<std::size_t>(num_companions));
    for (OwnedRow& row : rows) row = {.logits = random_logits(5000, 2), .output = {9}, .seed = entropy()};
    rows.insert(rows.begin() + num_companions / 2, seeded);
    const std::vector<std::int32_t> tokens = sample_all(rows);
    CHECK(tokens[static_cast<std::size_t>(num_companions / 2)] == alone);
    std::vector<OwnedRow> reversed(rows.rbegin(), rows.rend());
    std::vector<std::int32_t> reversed_tokens = sample_all(reversed);
    std::reverse(reversed_tokens.begin(), reversed_tokens.end());
    CHECK(reversed_tokens == tokens);
    for (const int num_threads : {1, 2, 5}) {
      ThreadPool threads(num_threads);
      CHECK(sample_all(rows, &threads) == tokens);
    }
  }
}

TEST_CASE("seeds and output positions give different tokens, and the same ones again") {
  OwnedRow row{.logits = std::vector<float>(100000, 0.0F)};
  std::vector<std::int32_t> tokens;
  for (row.seed = 0; row.seed < 4; ++row.seed)
    for (std::size_t position = 0; position < 8; ++position) {
      row.output.assign(position, 0);
      tokens.push_back(sample_one(row).token_id);
      CHECK(sample_one(row).token_id == tokens.back());
    }
  row.output.clear();
  row.seed = std::uint64_t{1} << 32;  // the high half counts too
  tokens.push_back(sample_one(row).token_id);
  std::sort(tokens.begin(), tokens.end());
  CHECK(std::adjacent_find(tokens.begin(), tokens.end()) == tokens.end());
}

TEST_CASE("D82: each of 1,500 allowed ids can be chosen, and none but them") {
  OwnedRow row{.logits = std::vector<float>(32000, 1.0F), .params = {.temperature = 0}};
  std::vector<int>& allowed = row.params.allowed_token_ids;
  allowed = {1, 5, 100, 31999};
  for (int id = 1000; allowed.size() < 1500; id += 19) allowed.push_back(id);
  std::shuffle(allowed.begin(), allowed.end(), std::mt19937(3));
  for (const int id : allowed) {
    row.logits[static_cast<std::size_t>(id)] = 2.0F;
    row.logits[2] = 3.0F;  // not allowed
    CHECK(sample_one(row).token_id == id);
    row.logits[static_cast<std::size_t>(id)] = 1.0F;
  }
}

TEST_CASE("D83: bad words are matched over the committed tokens and the drafts before each position") {
  const std::vector<std::int32_t> committed{7, 10, 11};
  const std::vector<std::int32_t> drafts{12, 13};
  OwnedRow row{.logits = std::vector<float>(64, 0.0F), .params = {.temperature = 0}, .prompt = {11, 11}};
  row.params.bad_words = {{12, 13, 40}, {11, 12, 30}, {11, 11, 50}, {10, 11, 60}};
  for (std::size_t num_drafts = 0; num_drafts <= drafts.size(); ++num_drafts) {
    row.output = committed;
    row.output.insert(row.output.end(), drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(num_drafts));
    for (const int id : {40, 30, 50, 60}) {
      OwnedRow forced = row;
      forced.logits[static_cast<std::size_t>(id)] = 1.0F;
      const bool masked = std::array{60, 30, 40}[num_drafts] == id;
      CAPTURE(num_drafts);
      CAPTURE(id);
      CHECK((sample_one(forced).token_id != id) == masked);
    }
  }
}

TEST_CASE("D84: stop ids are masked until min_tokens output tokens exist, and not longer") {
  OwnedRow row{.logits = std::vector<float>(16, 0.0F), .params = {.temperature = 0}, .prompt = {1, 1, 1, 1, 1}};
  row.logits[5] = 10.0F, row.logits[6] = 9.0F;  // two end-of-sequence ids
  row.params.min_tokens = 3;
  row.params.stop_token_ids = {5, 6};
  for (int step = 0; step < 10; ++step) {
    const std::int32_t token = sample_one(row).token_id;
    CHECK((token == 5) == (step >= 3));
    CHECK(token != 6);
    row.output.push_back(token);
  }
}

TEST_CASE("D85: a stop id that comes early is not chosen before min_tokens") {
  OwnedRow row{.logits = {0, 8, 1}, .params = {.temperature = 1, .min_tokens = 5, .stop_token_ids = {1}}};
  for (int step = 0; step < 5; ++step) {
    for (row.seed = 0; row.seed < 100; ++row.seed) CHECK(sample_one(row).token_id != 1);
    row.output.push_back(0);
  }
  row.seed = 0;
  CHECK(sample_one(row).token_id == 1);
}

TEST_CASE("D86: a row that is a slice of a wider padded buffer equals a contiguous one, and the padding is untouched") {
  constexpr std::int64_t kVocab = 1001, kPadded = 1024, kRows = 5;
  for (const float temperature : {0.0F, 1.0F}) {
    std::vector<float> buffer(static_cast<std::size_t>(kRows * kPadded), 1000.0F);
    std::vector<OwnedRow> rows(kRows);
    std::vector<ops::SamplerRow> slices;
    for (std::int64_t i = 0; i < kRows; ++i) {
      OwnedRow& row = rows[static_cast<std::size_t>(i)];
      row = {.logits = random_logits(kVocab, static_cast<std::uint32_t>(i)), .output = {3, 4, 4}};
      row.params = {.temperature = temperature, .top_p = 0.9F, .top_k = 40, .frequency_penalty = 1.5F};
      row.seed = static_cast<std::uint64_t>(i);
      std::copy(row.logits.begin(), row.logits.end(), buffer.begin() + i * kPadded);
      slices.push_back(row.view());
      slices.back().logits = make_view(buffer.data() + i * kPadded, DType::f32, {kVocab});
    }
    const std::vector<ops::SampledToken> sampled = ops::sample({}, slices);
    const std::vector<std::int32_t> expected = sample_all(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CHECK(sampled[i].token_id == expected[i]);
      const float* row_end = buffer.data() + i * kPadded + kVocab;
      CHECK(std::all_of(row_end, row_end + (kPadded - kVocab), [](float x) { return x == 1000.0F; }));
    }
  }
}

TEST_CASE("D87: a top_k outside (0, vocab) is off, and top_k 1 is argmax") {
  constexpr int kVocab = 500;
  OwnedRow row{.logits = random_logits(kVocab, 4)};
  OwnedRow tied{.logits = std::vector<float>(kVocab, 1.0F)};
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    row.seed = tied.seed = seed;
    row.params.top_k = 0;
    const std::int32_t off = sample_one(row).token_id;
    for (const int top_k : {-1, kVocab, kVocab + 1, 1'000'000'000, std::numeric_limits<int>::min()}) {
      row.params.top_k = top_k;
      CHECK(sample_one(row).token_id == off);
    }
    row.params.top_k = tied.params.top_k = 1;
    CHECK(sample_one(row).token_id == std::max_element(row.logits.begin(), row.logits.end()) - row.logits.begin());
    CHECK(sample_one(tied).token_id == 0);
  }
}

TEST_CASE("D56: a row without a usable logit says so and harms no other row") {
  const std::vector<float> good = random_logits(300, 5);
  std::vector<float> one_nan = good, one_inf = good;
  one_nan[299] = kNaN;
  one_inf[17] = kInfinity;
  const std::vector<std::vector<float>> bad{std::vector<float>(300, kNaN), one_nan, one_inf,
                                            std::vector<float>(300, -kInfinity), std::vector<float>(300, kInfinity)};
  for (const float temperature : {0.0F, 1.0F}) {
    const SamplingParams params{.temperature = temperature, .top_p = 0.9F, .top_k = 50, .logprobs = 3};
    OwnedRow ok{.logits = good, .params = params, .seed = 8};
    const std::int32_t expected = sample_one(ok).token_id;
    std::vector<OwnedRow> rows;
    for (const std::vector<float>& logits : bad) {
      rows.push_back({.logits = logits, .params = params});
      rows.push_back(ok);
    }
    const std::vector<ops::SampledToken> sampled = ops::sample({}, test::views_of(rows));
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      CAPTURE(i);
      CHECK(sampled[i].is_finite == (i % 2 == 1));
      CHECK(sampled[i].token_id == (i % 2 == 1 ? expected : 0));
      CHECK(sampled[i].logprobs.has_value() == (i % 2 == 1));
    }
  }
}

TEST_CASE("masks that leave nothing give is_finite = false; one token that is left is chosen") {
  OwnedRow row{.logits = {1, 2, -kInfinity, 4}};
  for (row.params.temperature = 0.0F; row.params.temperature < 2.0F; row.params.temperature += 1.0F) {
    row.params.allowed_token_ids = {2};
    CHECK_FALSE(sample_one(row).is_finite);
    row.params.allowed_token_ids = {2, 0};
    for (row.seed = 0; row.seed < 20; ++row.seed) CHECK(sample_one(row).token_id == 0);
  }
}

TEST_CASE("a masked token is never drawn, at any temperature and with every filter") {
  OwnedRow row{.logits = std::vector<float>(200, -kInfinity)};
  for (std::size_t id = 3; id < 200; id += 50) row.logits[id] = -1e4F * static_cast<float>(id);
  for (const float temperature : {0.0F, 0.01F, 1.0F, 2.0F})
    for (const int top_k : {0, 1, 100})
      for (const float top_p : {1e-6F, 0.5F, 0.9999999F, 1.0F})
        for (const float min_p : {0.0F, 1e-30F, 1.0F})
          for (row.seed = 0; row.seed < 20; ++row.seed) {
            row.params = {.temperature = temperature, .top_p = top_p, .top_k = top_k, .min_p = min_p};
            const ops::SampledToken sampled = sample_one(row);
            CHECK(sampled.is_finite);
            CHECK(sampled.token_id % 50 == 3);
          }
}

TEST_CASE("huge logits and penalties stay finite") {
  constexpr float kMax = std::numeric_limits<float>::max();
  OwnedRow row{.logits = {kMax, kMax, -kMax, -kMax}, .prompt = {0, 2}, .output = {1, 3}};
  row.params = {.temperature = 1, .presence_penalty = 2, .frequency_penalty = 2, .repetition_penalty = 1e-30F};
  CHECK(sample_one(row).is_finite);
  row.params.repetition_penalty = 1e30F;
  CHECK(sample_one(row).is_finite);
  row.params = {.temperature = 0.01F, .top_p = 0.5F};
  CHECK(sample_one(row).token_id == 0);
}

TEST_CASE("sample refuses what does not fit, with the numbers") {
  OwnedRow row{.logits = {1, 2, 3}};
  ops::SamplerRow view = row.view();
  const auto sample_view = [&] { return ops::sample({}, {&view, 1}); };
  CHECK(ops::sample({}, {}).empty());
  view.params = nullptr;
  CHECK_THROWS_WITH_AS(sample_view(), "row 0 of the sampler has no sampling parameters", InvalidArgument);
  view = row.view();
  view.logits.dtype = DType::bf16;
  CHECK_THROWS_WITH_AS(sample_view(), "row 0: logits are bf16, not f32", InvalidArgument);
  view = row.view();
  view.logits.stride[0] = 2;
  CHECK_THROWS_AS(sample_view(), InvalidArgument);
  view = row.view();
  view.logits.shape[0] = 0;
  CHECK_THROWS_AS(sample_view(), InvalidArgument);
  view = row.view();
  CHECK_THROWS_AS(ops::sample({.device = {DeviceType::cuda, 0}}, {&view, 1}), Unsupported);
  row.params.logit_bias = {{3, 1.0F}};
  CHECK_THROWS_WITH_AS(sample_one(row), "logit_bias has token id 3, outside the vocabulary [0, 3)", InvalidArgument);
  row.params = {.repetition_penalty = 2};
  row.prompt = {-1};
  CHECK_THROWS_WITH_AS(sample_one(row), "the prompt has token id -1, outside the vocabulary [0, 3)", InvalidArgument);
  row.params = {.presence_penalty = 2};
  row.output = {3};
  CHECK_THROWS_WITH_AS(sample_one(row), "the output has token id 3, outside the vocabulary [0, 3)", InvalidArgument);
}

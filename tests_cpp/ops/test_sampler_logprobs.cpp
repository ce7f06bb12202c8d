#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;
using test::OwnedRow;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TokenLogprobs reference_logprobs(const std::vector<float>& logits, std::int32_t token_id, std::size_t count) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](std::int32_t id) { return logits[static_cast<std::size_t>(id)]; };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logit(a) > logit(b); });
  order.resize(std::min(count, order.size()));
  order.insert(order.begin(), token_id);
  TokenLogprobs result{.token_ids = order, .logprobs = {}, .rank = 1};
  for (const std::int32_t id : order)
    result.logprobs.push_back(static_cast<float>(static_cast<double>(logit(id)) - max - std::log(sum)));
  for (const float x : logits) result.rank += x > logit(token_id);
  return result;
}

}  // namespace

TEST_CASE("token_logprobs agrees with the slow reference") {
  for (const std::size_t size : {1U, 2U, 33U, 1000U, 4097U})
    for (const int count : {0, 1, 5, 20, -1, 5000}) {
      std::vector<float> logits = test::random_logits(size, static_cast<std::uint32_t>(size));
      for (std::size_t i = 0; i < size; i += 3) logits[i] = std::round(logits[i]);  // some ties
      if (size > 10) logits[4] = logits[9] = -kInfinity;
      for (const std::size_t id : {std::size_t{0}, size / 2, size - 1}) {
        CAPTURE(size);
        CAPTURE(count);
        CAPTURE(id);
        const auto token_id = static_cast<std::int32_t>(id);
        const TokenLogprobs got = ops::token_logprobs(logits, token_id, count);
        const TokenLogprobs expected =
            reference_logprobs(logits, token_id, count < 0 ? size : static_cast<std::size_t>(count));
        CHECK(got.token_ids == expected.token_ids);
        CHECK(got.rank == expected.rank);
        REQUIRE(got.logprobs.size() == expected.logprobs.size());
        for (std::size_t i = 0; i < got.logprobs.size(); ++i) {
          if (std::isinf(expected.logprobs[i])) {
            CHECK(got.logprobs[i] == expected.logprobs[i]);
          } else {
            CHECK(std::abs(got.logprobs[i] - expected.logprobs[i]) <= 2e-6F);
          }
        }
      }
    }
}

TEST_CASE("the rank counts what is strictly better, from 1") {
  const std::vector<float> logits{1, 3, 3, 2};
  CHECK(ops::token_logprobs(logits, 1, 0).rank == 1);
  CHECK(ops::token_logprobs(logits, 2, 0).rank == 1);
  CHECK(ops::token_logprobs(logits, 3, 0).rank == 3);
  CHECK(ops::token_logprobs(logits, 0, 0).rank == 4);
}

TEST_CASE("sample returns the raw log probabilities, before bias, penalties and temperature") {
  OwnedRow row{.logits = test::random_logits(100, 6), .output = {3, 3}, .seed = 5};
  const std::vector<float> raw = row.logits;
  row.params = {.temperature = 0.3F, .top_k = 4, .frequency_penalty = 2, .logprobs = 6, .bad_words = {{9}}};
  for (const float bias : {0.0F, 50.0F}) {
    if (bias > 0) row.params.logit_bias = {{42, bias}};
    const ops::SampledToken sampled = test::sample_one(row);
    if (bias > 0) CHECK(sampled.token_id == 42);
    const TokenLogprobs expected = reference_logprobs(raw, sampled.token_id, 6);
    REQUIRE(sampled.logprobs.has_value());
    CHECK(sampled.logprobs->token_ids == expected.token_ids);
    CHECK(sampled.logprobs->rank == expected.rank);
    for (std::size_t i = 0; i < expected.logprobs.size(); ++i)
      CHECK(std::abs(sampled.logprobs->logprobs[i] - expected.logprobs[i]) <= 2e-6F);
  }
  row.params.logprobs = std::nullopt;
  CHECK_FALSE(test::sample_one(row).logprobs.has_value());
  row.params.logprobs = 0;
  CHECK(test::sample_one(row).logprobs->token_ids.size() == 1);
  row.params.logprobs = -1;
  CHECK(test::sample_one(row).logprobs->token_ids.size() == 101);
}

TEST_CASE("rows that are not finite have no log probabilities") {
  std::vector<float> logits{1, 2, 3};
  CHECK(ops::is_finite(logits));
  CHECK_THROWS_AS(ops::token_logprobs(logits, 3, 1), InvalidArgument);
  CHECK_THROWS_AS(ops::token_logprobs(logits, -1, 1), InvalidArgument);
  CHECK_THROWS_AS(ops::token_logprobs(logits, 0, -2), InvalidArgument);
  logits[1] = -kInfinity;
  CHECK(ops::is_finite(logits));
  CHECK(ops::token_logprobs(logits, 1, 0).logprobs.front() == -kInfinity);
  for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    logits[1] = bad;
    CHECK_FALSE(ops::is_finite(logits));
    CHECK_THROWS_AS(ops::token_logprobs(logits, 0, 1), InvalidArgument);
  }
  CHECK_FALSE(ops::is_finite(std::vector<float>(3, -kInfinity)));
}

TEST_CASE("token_logprobs of many rows equals one by one, whatever the row stride; a row with a NaN has none") {
  constexpr std::int64_t kRows = 7, kVocab = 100, kStride = 128;
  std::vector<float> buffer = test::random_logits(kRows * kStride, 3);
  buffer[2 * kStride + 50] = std::numeric_limits<float>::quiet_NaN();
  buffer[3 * kStride + kVocab] = std::numeric_limits<float>::quiet_NaN();  // padding
  const std::vector<std::int32_t> token_ids{0, 99, 3, 4, 5, 6, 7};
  TensorView logits = make_view(buffer.data(), DType::f32, {kRows, kVocab});
  logits.stride[0] = kStride;
  ThreadPool pool(3);
  for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    const auto rows = ops::token_logprobs({.threads = threads}, logits, token_ids, 4);
    REQUIRE(rows.size() == kRows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      CHECK(rows[i].has_value() == (i != 2));
      if (!rows[i]) continue;
      const TokenLogprobs one = ops::token_logprobs({buffer.data() + i * kStride, kVocab}, token_ids[i], 4);
      CHECK(rows[i]->token_ids == one.token_ids);
      CHECK(rows[i]->logprobs == one.logprobs);
      CHECK(rows[i]->rank == one.rank);
    }
  }
  CHECK(ops::token_logprobs({}, logits.slice(0, 0), {}, 4).empty());
  CHECK_THROWS_WITH_AS(ops::token_logprobs({}, logits, std::span(token_ids).first(6), 4),
                       "logits have 7 rows, and there are 6 token ids", InvalidArgument);
  CHECK_THROWS_AS(ops::token_logprobs({}, logits, std::vector<std::int32_t>(7, 100), 4), InvalidArgument);
  CHECK_THROWS_AS(ops::token_logprobs({.device = {DeviceType::cuda, 0}}, logits, token_ids, 4), Unsupported);
  logits.stride[1] = 2;
  CHECK_THROWS_AS(ops::token_logprobs({}, logits, token_ids, 4), InvalidArgument);
}

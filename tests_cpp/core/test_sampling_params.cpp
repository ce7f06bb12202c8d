#include <deltaic/sampling_params.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

using namespace deltaic;

namespace {

constexpr int kVocab = 1000;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The message of validate(), empty where it accepts.
std::string refusal(const std::function<void(SamplingParams&)>& change) {
  SamplingParams params;
  change(params);
  try {
    validate(params, kVocab);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("D105: every real-valued field at, below and above its range, NaN and infinite") {
  struct Field {
    const char* name;
    float SamplingParams::* member;
    std::vector<float> good, bad;
  };
  const float above_one = 1.0000001F, above_two = 2.0000002F, tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<Field> fields{
      {"temperature", &SamplingParams::temperature, {0, 1e-6F, 0.01F, 1, 2}, {-0.1F, -tiny, 1e-5F, 0.0099F, above_two}},
      {"top_p", &SamplingParams::top_p, {tiny, 0.5F, 1}, {0, -0.1F, above_one, 1.1F}},
      {"min_p", &SamplingParams::min_p, {0, 0.5F, 1}, {-tiny, -0.1F, above_one}},
      {"presence_penalty", &SamplingParams::presence_penalty, {-2, 0, 2}, {-above_two, above_two}},
      {"frequency_penalty", &SamplingParams::frequency_penalty, {-2, 0, 2}, {-above_two, above_two}},
      {"repetition_penalty", &SamplingParams::repetition_penalty, {tiny, 1, 1e30F}, {0, -1}},
  };
  for (const Field& field : fields) {
    CAPTURE(field.name);
    for (const float value : field.good) {
      CAPTURE(value);
      CHECK(refusal([&](SamplingParams& p) { p.*field.member = value; }).empty());
    }
    std::vector<float> bad = field.bad;
    bad.insert(bad.end(), {kNaN, kInfinity, -kInfinity});
    for (const float value : bad) {
      CAPTURE(value);
      CHECK(refusal([&](SamplingParams& p) { p.*field.member = value; }).starts_with(std::string(field.name) + " is "));
    }
  }
}

TEST_CASE("a refusal names the field, the value and the range") {
  CHECK(refusal([](auto& p) { p.temperature = 2.1F; }) == "temperature is 2.1; it must be 0 (greedy) or in [0.01, 2]");
  CHECK(refusal([](auto& p) { p.temperature = kNaN; }) == "temperature is nan; it must be 0 (greedy) or in [0.01, 2]");
  CHECK(refusal([](auto& p) { p.top_p = 1.0000001F; }) == "top_p is 1.0000001; it must be in (0, 1]");
  CHECK(refusal([](auto& p) { p.min_p = -0.5F; }) == "min_p is -0.5; it must be in [0, 1]");
  CHECK(refusal([](auto& p) { p.presence_penalty = 3; }) == "presence_penalty is 3; it must be in [-2, 2]");
  CHECK(refusal([](auto& p) { p.frequency_penalty = -3; }) == "frequency_penalty is -3; it must be in [-2, 2]");
  CHECK(refusal([](auto& p) { p.repetition_penalty = 0; }) == "repetition_penalty is 0; it must be > 0 and finite");
  CHECK(refusal([](auto& p) { p.min_tokens = -1; }) == "min_tokens is -1; it must be >= 0");
  CHECK(refusal([](auto& p) { p.logprobs = -2; }) ==
        "logprobs is -2; it must be -1 (the whole vocabulary) or in [0, 1000]");
  CHECK(refusal([](auto& p) { p.prompt_logprobs = 1001; }) ==
        "prompt_logprobs is 1001; it must be -1 (the whole vocabulary) or in [0, 1000]");
  CHECK(refusal([](auto& p) { p.logit_bias[7] = 100.5F; }) ==
        "logit_bias of token 7 is 100.5; it must be in [-100, 100]");
  CHECK(refusal([](auto& p) { p.bad_words = {{1}, {}}; }) == "bad_words entry 1 of 2 has no token");
}

TEST_CASE("counts at, below and above their range") {
  for (const int count : {-1, 0, 1, kVocab}) {
    CHECK(refusal([&](auto& p) { p.logprobs = count; }).empty());
    CHECK(refusal([&](auto& p) { p.prompt_logprobs = count; }).empty());
  }
  for (const int count : {-2, kVocab + 1, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    CHECK(refusal([&](auto& p) { p.logprobs = count; }).starts_with("logprobs is "));
    CHECK(refusal([&](auto& p) { p.prompt_logprobs = count; }).starts_with("prompt_logprobs is "));
  }
  for (const int top_k : {std::numeric_limits<int>::min(), -1, 0, 1, kVocab, std::numeric_limits<int>::max()})
    CHECK(refusal([&](auto& p) { p.top_k = top_k; }).empty());
  for (const std::int64_t seed : {std::numeric_limits<std::int64_t>::min(), std::int64_t{0}, std::int64_t{42}})
    CHECK(refusal([&](auto& p) { p.seed = seed; }).empty());
  CHECK(refusal([](auto& p) { p.min_tokens = std::numeric_limits<int>::max(); }).empty());
  CHECK(refusal([](auto& p) { p.min_tokens = std::numeric_limits<int>::min(); }).starts_with("min_tokens is "));
}

TEST_CASE("D106: token ids outside the vocabulary are refused in every field") {
  for (const int id : {-1, kVocab, 2'000'000'000, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    const std::string end = " has token id " + std::to_string(id) + ", outside the vocabulary [0, 1000)";
    CHECK(refusal([&](auto& p) { p.logit_bias = {{id, 1.0F}}; }) == "logit_bias" + end);
    CHECK(refusal([&](auto& p) { p.allowed_token_ids = {0, id}; }) == "allowed_token_ids" + end);
    CHECK(refusal([&](auto& p) { p.stop_token_ids = {id}; }) == "stop_token_ids" + end);
    CHECK(refusal([&](auto& p) { p.bad_words = {{1, id, 2}}; }) == "bad_words" + end);
  }
  for (const int id : {0, kVocab - 1}) {
    CHECK(refusal([&](auto& p) { p.logit_bias = {{id, 1.0F}}; }).empty());
    CHECK(refusal([&](auto& p) { p.allowed_token_ids = {id}; }).empty());
    CHECK(refusal([&](auto& p) { p.stop_token_ids = {id}; }).empty());
    CHECK(refusal([&](auto& p) { p.bad_words = {{id}}; }).empty());
  }
  for (const float bias : {-100.0F, 0.0F, 100.0F}) CHECK(refusal([&](auto& p) { p.logit_bias = {{3, bias}}; }).empty());
  for (const float bias : {-100.00001F, 100.00001F, kNaN, kInfinity, -kInfinity})
    CHECK(refusal([&](auto& p) { p.logit_bias = {{3, bias}}; }).starts_with("logit_bias of token 3 is "));
}

TEST_CASE("fields that leave no token to choose are refused together") {
  const std::string start = "no token can be chosen: allowed_token_ids (";
  CHECK(refusal([](auto& p) {
          p.allowed_token_ids = {5, 6}, p.bad_words = {{5}, {6}};
        }).starts_with(start + "2 of 1000"));
  CHECK(refusal([](auto& p) {
          p.allowed_token_ids = {5, 6}, p.min_tokens = 1, p.stop_token_ids = {6}, p.bad_words = {{5}};
        }).starts_with(start));
  CHECK(refusal([](auto& p) {
          for (int id = 0; id < kVocab; ++id) p.bad_words.push_back({id});
        }).starts_with(start + "all of 1000"));
  CHECK(refusal([](auto& p) { p.allowed_token_ids = {5, 6}, p.bad_words = {{5}, {5, 6}}; }).empty());
  CHECK(refusal([](auto& p) { p.allowed_token_ids = {6}, p.stop_token_ids = {6}; }).empty());
}

TEST_CASE("a vocabulary without a token is refused") {
  CHECK_NOTHROW(validate({}, 1));
  for (const int vocab_size : {0, -1}) CHECK_THROWS_AS(validate({}, vocab_size), InvalidArgument);
}

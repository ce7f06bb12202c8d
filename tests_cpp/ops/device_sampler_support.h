#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "cpp/src/ops/device_sampler.h"
#include "tests_cpp/ops/sampler_support.h"
#include "tests_cpp/support/on_device.h"

namespace deltaic::test {

// A request as both samplers see it.
struct SampledRequest {
  SamplingParams params{};
  std::vector<std::int32_t> prompt{}, output{};
  std::uint64_t seed = 0;
};

// What a step of the device sampler gave for one row.
struct DeviceToken {
  std::int32_t token_id = -1;
  bool is_finite = false;
  TokenLogprobs logprobs{};  // as many columns as the step had
};

// Runs the device sampler on rows of host logits. Output buffers hold rubbish before a step.
class DeviceSteps {
 public:
  DeviceSteps(int vocab_size, int max_num_slots, int max_num_rows, std::int64_t row_stride = 0, int max_context = 0)
      : vocab_size_(vocab_size),
        row_stride_(row_stride == 0 ? vocab_size : row_stride),
        max_context_(max_context),
        sampler_(vocab_size, max_num_slots, max_num_rows, {.device = kGpu}, max_context),
        logits_(DType::f32, {max_num_rows, row_stride_}, kGpu) {}

  ops::DeviceSampler& sampler() { return sampler_; }
  void set(int slot, const SampledRequest& request) {
    sampler_.set_request(slot, request.params, request.prompt, request.output, request.seed);
  }

  std::vector<DeviceToken> step(const std::vector<std::vector<float>>& logits, const std::vector<std::int32_t>& slots,
                                const std::vector<std::int32_t>& positions, int num_logprobs, bool all_greedy = false,
                                const std::vector<std::vector<std::int32_t>>& contexts = {}) {
    const auto num_rows = static_cast<std::int64_t>(slots.size());
    Tensor host(DType::f32, {std::max<std::int64_t>(num_rows, 1), row_stride_});
    std::fill_n(host.as<float>(), host.view().numel(), std::numeric_limits<float>::quiet_NaN());
    for (std::size_t i = 0; i < logits.size(); ++i)
      std::copy(logits[i].begin(), logits[i].end(), host.as<float>() + static_cast<std::int64_t>(i) * row_stride_);
    cuda::copy_and_wait(logits_.view().data, host.view().data,
                        static_cast<std::size_t>(num_rows * row_stride_) * sizeof(float));
    const std::int64_t columns = 1 + std::max(num_logprobs, 0);
    const Tensor slots_gpu = ints(slots), positions_gpu = ints(positions);
    const Tensor tokens = ints(std::vector<std::int32_t>(slots.size(), -77));
    const Tensor ranks = ints(std::vector<std::int32_t>(slots.size(), -77));
    const Tensor ids = ints(std::vector<std::int32_t>(slots.size() * static_cast<std::size_t>(columns), -77));
    const Tensor logprobs(DType::f32, {num_rows, columns}, kGpu);
    const Tensor finite(DType::u8, {num_rows}, kGpu);
    TensorView view = logits_.view().slice(0, num_rows);
    view.shape[1] = vocab_size_;
    ops::DeviceSampler::Args args{.logits = view,
                                  .slots = slots_gpu.view(),
                                  .output_positions = positions_gpu.view(),
                                  .all_greedy = all_greedy,
                                  .num_logprobs = num_logprobs,
                                  .token_ids = tokens.view(),
                                  .is_finite = finite.view()};
    std::vector<std::int32_t> context_ids(slots.size() * static_cast<std::size_t>(max_context_), -5), num_context;
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      std::copy(contexts[i].begin(), contexts[i].end(),
                context_ids.begin() + static_cast<std::ptrdiff_t>(i) * max_context_);
      num_context.push_back(static_cast<std::int32_t>(contexts[i].size()));
    }
    const Tensor context_gpu = ints(context_ids), num_context_gpu = ints(num_context);
    if (!contexts.empty()) {
      args.context_ids = context_gpu.view().reshape({num_rows, max_context_});
      args.num_context = num_context_gpu.view();
    }
    if (num_logprobs >= 0) {
      args.logprob_token_ids = ids.view().reshape({num_rows, columns});
      args.logprobs = logprobs.view();
      args.ranks = ranks.view();
    }
    sampler_.sample(args);
    const Tensor host_tokens = to_host(tokens), host_finite = to_host(finite), host_ids = to_host(ids);
    const Tensor host_logprobs = to_host(logprobs), host_ranks = to_host(ranks);
    std::vector<DeviceToken> result(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      result[i].token_id = host_tokens.as<std::int32_t>()[i];
      result[i].is_finite = host_finite.as<std::uint8_t>()[i] != 0;
      result[i].logprobs.rank = host_ranks.as<std::int32_t>()[i];
      for (std::int64_t j = 0; j < columns; ++j) {
        const std::int64_t at = static_cast<std::int64_t>(i) * columns + j;
        result[i].logprobs.token_ids.push_back(host_ids.as<std::int32_t>()[at]);
        result[i].logprobs.logprobs.push_back(host_logprobs.as<float>()[at]);
      }
    }
    return result;
  }

  // The tokens that stand of each slot; `positions` as AddedTokens has them.
  void add(const std::vector<std::int32_t>& slots, const std::vector<std::vector<std::int32_t>>& tokens,
           const std::vector<std::int32_t>& positions) {
    const auto num_rows = static_cast<std::int64_t>(slots.size());
    std::vector<std::int32_t> ids(slots.size() * static_cast<std::size_t>(1 + max_context_), 0), counts;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      std::copy(tokens[i].begin(), tokens[i].end(), ids.begin() + static_cast<std::ptrdiff_t>(i) * (1 + max_context_));
      counts.push_back(static_cast<std::int32_t>(tokens[i].size()));
    }
    const Tensor slots_gpu = ints(slots), ids_gpu = ints(ids), counts_gpu = ints(counts),
                 positions_gpu = ints(positions);
    sampler_.add_tokens({.slots = slots_gpu.view(),
                         .output_positions = positions_gpu.view(),
                         .token_ids = ids_gpu.view().reshape({num_rows, 1 + max_context_}),
                         .counts = counts_gpu.view()});
    cuda::wait_for_device(kGpu.index);
  }

 private:
  static Tensor ints(const std::vector<std::int32_t>& values) {
    Tensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())}, kGpu);
    if (!values.empty()) cuda::copy_and_wait(tensor.view().data, values.data(), values.size() * sizeof(std::int32_t));
    return tensor;
  }

  int vocab_size_;
  std::int64_t row_stride_;
  int max_context_;
  ops::DeviceSampler sampler_;
  Tensor logits_;
};

// What the CPU gives for the same row.
inline ops::SampledToken sample_on_cpu(std::vector<float> logits, const SampledRequest& request) {
  const ops::SamplerRow row{.logits = make_view(logits.data(), DType::f32, {static_cast<std::int64_t>(logits.size())}),
                            .params = &request.params,
                            .prompt_token_ids = request.prompt,
                            .output_token_ids = request.output,
                            .seed = request.seed};
  return ops::sample({}, {&row, 1}).front();
}

inline void check_same(const DeviceToken& actual, const ops::SampledToken& expected) {
  CHECK(actual.is_finite == expected.is_finite);
  CHECK(actual.token_id == expected.token_id);
  if (!expected.logprobs) return;
  CHECK(actual.logprobs.rank == expected.logprobs->rank);
  for (std::size_t i = 0; i < expected.logprobs->token_ids.size(); ++i) {
    CAPTURE(i);
    CHECK(actual.logprobs.token_ids[i] == expected.logprobs->token_ids[i]);
    const double want = static_cast<double>(expected.logprobs->logprobs[i]);
    const double got = static_cast<double>(actual.logprobs.logprobs[i]);
    CHECK((got == want || std::abs(got - want) <= 1e-6 * (1.0 + std::abs(want))));
  }
}

// Requests and rows of logits of every kind.
class RandomRequests {
 public:
  RandomRequests(int vocab_size, std::uint32_t seed) : vocab_size_(vocab_size), rng_(seed) {}

  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
  float real(float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng_); }
  bool one_in(int n) { return integer(1, n) == 1; }
  std::int32_t token() { return integer(0, vocab_size_ - 1); }

  SampledRequest request() {
    SampledRequest r;
    r.seed = std::uint64_t{rng_()} << 32 | rng_();
    for (int i = integer(0, 40); i > 0; --i) r.prompt.push_back(token());
    for (int i = integer(0, 20); i > 0; --i) r.output.push_back(integer(0, std::min(vocab_size_ - 1, 30)));
    SamplingParams& p = r.params;
    p.temperature = one_in(5) ? 0.0F : one_in(2) ? real(0.01F, 2.0F) : 1.0F;
    if (one_in(2)) p.top_k = one_in(3) ? integer(1, vocab_size_) : integer(1, 64);
    if (one_in(2)) p.top_p = one_in(4) ? 0.999999F : real(0.05F, 1.0F);
    if (one_in(4)) p.min_p = real(0, 1) * real(0, 1) * real(0, 1);
    if (one_in(3)) p.logprobs = one_in(2) ? 0 : std::min(integer(1, 20), vocab_size_);
    if (one_in(3)) add_processors(r);
    return r;
  }

  std::vector<float> logits() {
    const int kind = integer(0, 7);
    constexpr float kScales[] = {3, 0.1F, 20, 100, 1, 3, 0, 1e37F};
    std::normal_distribution<float> normal(0.0F, 1.0F);
    std::vector<float> row(static_cast<std::size_t>(vocab_size_));
    for (float& logit : row) {
      logit = normal(rng_) * kScales[kind];  // kind 6: 0 and -0
      if (kind == 4) logit = std::round(logit);
      if (kind == 5 && one_in(3)) logit = -std::numeric_limits<float>::infinity();
    }
    if (one_in(40)) row[static_cast<std::size_t>(token())] = std::numeric_limits<float>::quiet_NaN();
    if (one_in(40)) row[static_cast<std::size_t>(token())] = std::numeric_limits<float>::infinity();
    return row;
  }

 private:
  void add_processors(SampledRequest& r) {
    SamplingParams& p = r.params;
    if (one_in(2)) p.presence_penalty = real(-2, 2);
    if (one_in(2)) p.frequency_penalty = real(-2, 2);
    if (one_in(2)) p.repetition_penalty = real(0.5F, 2);
    if (one_in(2))
      for (int i = integer(1, 20); i > 0; --i) p.logit_bias[token()] = real(-100, 100);
    if (one_in(3))
      for (int i = integer(1, 200); i > 0; --i) p.allowed_token_ids.push_back(token());
    if (one_in(2)) {
      p.min_tokens = integer(0, 25);
      for (int i = integer(0, 5); i > 0; --i) p.stop_token_ids.push_back(token());
    }
    if (!one_in(2)) return;
    // Words that begin as the output ends, mostly.
    for (int i = integer(1, 20); i > 0; --i) {
      std::vector<int> word;
      const int prefix = std::min(integer(0, 3), static_cast<int>(r.output.size()));
      for (int j = prefix; j > 0; --j)
        word.push_back(one_in(8) ? token() : r.output[r.output.size() - static_cast<std::size_t>(j)]);
      word.push_back(one_in(2) ? token() : integer(0, std::min(vocab_size_ - 1, 30)));
      p.bad_words.push_back(std::move(word));
    }
  }

  int vocab_size_;
  std::mt19937 rng_;
};

}  // namespace deltaic::test

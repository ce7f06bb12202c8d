#include <deltaic/error.h>

#include <numeric>

#include "cpp/src/ops/sampler_slot.h"
#include "tests_cpp/ops/device_sampler_support.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int32_t word_at(const ops::PackedSlot& packed, std::int32_t at) {
  return static_cast<std::int32_t>(packed.words.at(static_cast<std::size_t>(at)));
}

// Several steps of requests that come and go, against the CPU. Rows are shuffled, and some are padding.
void check_steps(int vocab_size, int num_slots, int num_steps, std::uint32_t seed, std::int64_t row_stride = 0) {
  CAPTURE(vocab_size);
  CAPTURE(num_slots);
  CAPTURE(seed);
  RandomRequests random(vocab_size, seed);
  DeviceSteps device(vocab_size, num_slots, num_slots, row_stride);
  std::vector<std::optional<SampledRequest>> requests(static_cast<std::size_t>(num_slots));
  for (int step = 0; step < num_steps; ++step) {
    CAPTURE(step);
    std::vector<std::vector<float>> logits;
    std::vector<std::int32_t> slots, positions;
    int num_logprobs = -1;
    for (int slot = 0; slot < num_slots; ++slot) {
      auto& request = requests[static_cast<std::size_t>(slot)];
      if (request && random.one_in(10)) {
        request.reset();
        device.sampler().release(slot);
      } else if (request && random.one_in(10)) {
        device.set(slot, *request);  // as after a preemption
      }
      if (!request) {
        request = random.request();
        device.set(slot, *request);
      }
      if (random.one_in(8)) continue;  // not in this step
      slots.push_back(random.one_in(12) ? -1 : slot);
      positions.push_back(static_cast<std::int32_t>(request->output.size()));
      logits.push_back(random.logits());
      num_logprobs = std::max(num_logprobs, request->params.logprobs.value_or(-1));
    }
    const std::vector<DeviceToken> tokens = device.step(logits, slots, positions, num_logprobs);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      CAPTURE(i);
      CAPTURE(slots[i]);
      if (slots[i] < 0) {
        CHECK(tokens[i].token_id == 0);
        CHECK(tokens[i].is_finite);
        continue;
      }
      auto& request = requests[static_cast<std::size_t>(slots[i])];
      const ops::SampledToken expected = sample_on_cpu(logits[i], *request);
      check_same(tokens[i], expected);
      if (expected.is_finite)
        request->output.push_back(expected.token_id);
      else
        request.reset();
    }
  }
}

}  // namespace

TEST_CASE("a packed slot turns off what does nothing and keeps the lists apart") {
  SamplingParams params;
  params.temperature = 1e-6F;
  params.top_k = 100;
  params.min_tokens = 2;
  params.stop_token_ids = {7, 9};
  params.logit_bias = {{3, 1.5F}, {99, -2.0F}};
  params.allowed_token_ids = {0, 33, 99};
  params.bad_words = {{5}, {1, 2, 3}};
  const std::vector<std::int32_t> none;
  const ops::PackedSlot packed = ops::pack_slot(params, 100, none, 11);
  const ops::SlotRecord& record = packed.record;
  CHECK(record.temperature == 0.0F);
  CHECK(record.top_k == 0);  // the whole vocabulary
  CHECK(record.seed == 11);
  CHECK(record.num_logprobs == -1);
  CHECK_FALSE(record.has_penalties);
  REQUIRE(record.num_stop_ids == 2);
  CHECK(word_at(packed, record.stop_ids_at + 1) == 9);
  REQUIRE(record.num_bias == 2);
  CHECK(word_at(packed, record.bias_ids_at + 1) == 99);
  CHECK(record.has_allowed);
  CHECK(word_at(packed, record.allowed_at) == 1);
  CHECK(word_at(packed, record.allowed_at + 1) == 2);
  CHECK(word_at(packed, record.allowed_at + 3) == 8);
  REQUIRE(record.num_bad_words == 2);
  CHECK(word_at(packed, record.word_starts_at + 2) == 4);
  CHECK(word_at(packed, record.word_tokens_at + 3) == 3);
  CHECK(record.history_size == 2);

  // Token j of the output at j % history_size; stop ids are gone once there are min_tokens.
  const std::vector<std::int32_t> output{10, 11, 12};
  const ops::PackedSlot later = ops::pack_slot(params, 100, output, 11);
  CHECK(later.record.num_stop_ids == 0);
  CHECK(word_at(later, later.record.history_at) == 12);
  CHECK(word_at(later, later.record.history_at + 1) == 11);
  CHECK(ops::pack_slot({}, 100, output, 11).words.empty());  // most requests upload nothing but their record
}

TEST_CASE("a packed slot names the list with an id outside the vocabulary") {
  const auto pack = [](SamplingParams params) { return ops::pack_slot(params, 10, {}, 0); };
  SamplingParams bias, allowed, stop, words;
  bias.logit_bias = {{10, 1.0F}};
  allowed.allowed_token_ids = {-1};
  stop.min_tokens = 1, stop.stop_token_ids = {10};
  words.bad_words = {{3, 11}};
  CHECK_THROWS_WITH_AS(pack(bias), doctest::Contains("logit_bias has token id 10"), InvalidArgument);
  CHECK_THROWS_WITH_AS(pack(allowed), doctest::Contains("allowed_token_ids has token id -1"), InvalidArgument);
  CHECK_THROWS_WITH_AS(pack(stop), doctest::Contains("stop_token_ids has token id 10"), InvalidArgument);
  CHECK_THROWS_WITH_AS(pack(words), doctest::Contains("bad_words has token id 11"), InvalidArgument);
}

TEST_CASE("only plain greedy requests are fine with argmax alone") {
  SamplingParams params;
  CHECK_FALSE(ops::DeviceSampler::needs_only_argmax(params, 0));
  params.temperature = 0.0F;
  CHECK(ops::DeviceSampler::needs_only_argmax(params, 0));
  params.min_tokens = 3;
  CHECK_FALSE(ops::DeviceSampler::needs_only_argmax(params, 2));
  CHECK(ops::DeviceSampler::needs_only_argmax(params, 3));
  params.frequency_penalty = 0.5F;
  CHECK_FALSE(ops::DeviceSampler::needs_only_argmax(params, 3));

  CHECK_FALSE(ops::DeviceSampler::gives_logprobs(params));
  for (const int count : {0, ops::DeviceSampler::kMaxLogprobs}) {
    params.logprobs = count;
    CHECK(ops::DeviceSampler::gives_logprobs(params));
  }
  for (const int count : {-1, ops::DeviceSampler::kMaxLogprobs + 1}) {
    params.logprobs = count;
    CHECK_FALSE(ops::DeviceSampler::gives_logprobs(params));
  }
}

TEST_CASE("the device sampler is for CUDA alone") {
  CHECK_THROWS_WITH_AS(ops::DeviceSampler(10, 1, 1, {}), doctest::Contains("use ops::sample on the CPU"), Unsupported);
  CHECK_THROWS_AS(ops::DeviceSampler(0, 1, 1, {}), InvalidArgument);
}

TEST_CASE("the device sampler agrees with the CPU over steps of requests that come and go") {
  if (!has_gpu()) return;
  for (const int vocab_size : {1, 2, 37, 1000, 4099})
    for (std::uint32_t seed = 1; seed <= 3; ++seed) check_steps(vocab_size, 70, 8, seed);
  check_steps(4096, 70, 8, 4, 4096 + 64);  // rows of a padded buffer
  check_steps(4096, 70, 8, 5, 4097);       // rows that no vector load fits
  check_steps(32773, 40, 4, 6);
  check_steps(4099, 3, 40, 7);
}

TEST_CASE("the device sampler agrees with the CPU on a vocabulary of 248,320") {
  if (!has_gpu()) return;
  check_steps(248320, 24, 3, 11);
  check_steps(248320, 2, 4, 12);
}

TEST_CASE("small steps of every kind [sanitizer]") {
  if (!has_gpu()) return;
  check_steps(203, 5, 2, 21);
  check_steps(1500, 2, 2, 22);
}

TEST_CASE("positions behind drafts give on the device what the CPU gives when the drafts stand [sanitizer]") {
  if (!has_gpu()) return;
  constexpr int kVocab = 150, kSlots = 9, kDrafts = 3;
  RandomRequests random(kVocab, 11);
  std::mt19937 generator(12);
  const auto below = [&](int n) { return static_cast<std::int32_t>(generator() % static_cast<unsigned>(n)); };
  DeviceSteps device(kVocab, kSlots, kSlots * (1 + kDrafts), 0, kDrafts);
  std::vector<SampledRequest> requests;
  for (int slot = 0; slot < kSlots; ++slot) {
    requests.push_back(random.request());
    device.set(slot, requests.back());
  }
  int num_steps_of_length[2 + kDrafts] = {};
  for (int step = 0; step < 60; ++step) {
    CAPTURE(step);
    std::vector<std::vector<float>> logits;
    std::vector<std::int32_t> slots, positions, kept_slots, kept_positions;
    std::vector<std::vector<std::int32_t>> contexts, kept_tokens;
    std::vector<ops::SampledToken> expected;
    int num_logprobs = -1;
    for (int slot = 0; slot < kSlots; ++slot) {
      SampledRequest& request = requests[static_cast<std::size_t>(slot)];
      if (random.one_in(12)) {
        request = random.request();
        device.set(slot, request);
      }
      num_logprobs = std::max(num_logprobs, request.params.logprobs.value_or(-1));
      const int num_drafts = below(1 + kDrafts);
      std::vector<std::int32_t> drafts, stand;
      SampledRequest position = request;
      bool is_right = true;
      for (int j = 0; j <= num_drafts; ++j) {
        logits.push_back(random.logits());
        slots.push_back(slot);
        positions.push_back(static_cast<std::int32_t>(request.output.size()) + j);
        contexts.push_back(drafts);
        expected.push_back(sample_on_cpu(logits.back(), position));
        const std::int32_t token = expected.back().token_id;
        is_right = is_right && expected.back().is_finite;
        if (is_right) stand.push_back(token);
        const std::int32_t draft = below(3) == 0 ? below(kVocab) : below(4) == 0 ? below(4) : token;
        is_right = is_right && draft == token;
        drafts.push_back(draft);
        position.output.push_back(draft);
      }
      kept_slots.push_back(slot);
      request.output.insert(request.output.end(), stand.begin(), stand.end());
      kept_positions.push_back(static_cast<std::int32_t>(request.output.size()));
      ++num_steps_of_length[stand.size()];
      kept_tokens.push_back(std::move(stand));
    }
    kept_slots.push_back(-1), kept_positions.push_back(0), kept_tokens.push_back({1});
    const std::vector<DeviceToken> tokens = device.step(logits, slots, positions, num_logprobs, false, contexts);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      CAPTURE(slots[i]);
      CAPTURE(contexts[i].size());
      check_same(tokens[i], expected[i]);
    }
    device.add(kept_slots, kept_tokens, kept_positions);
  }
  for (int length = 1; length < 2 + kDrafts; ++length) CHECK(num_steps_of_length[length] > 5);
}

TEST_CASE("sets that are too large to sort are cut exactly on the device") {
  if (!has_gpu()) return;
  constexpr int kVocab = 100003;
  std::vector<SampledRequest> requests;
  for (const int top_k : {0, 1, 1025, 5000, 99999})
    for (const float top_p : {0.3F, 0.999F, 0.9999999F, 1.0F})
      for (const float temperature : {0.3F, 1.0F}) {
        SampledRequest request;
        request.params.top_k = top_k, request.params.top_p = top_p, request.params.temperature = temperature;
        request.seed = requests.size();
        requests.push_back(request);
      }
  const auto num_rows = static_cast<int>(requests.size());
  DeviceSteps device(kVocab, num_rows, num_rows);
  std::vector<std::int32_t> slots(requests.size());
  std::iota(slots.begin(), slots.end(), 0);
  for (const std::int32_t slot : slots) device.set(slot, requests[static_cast<std::size_t>(slot)]);
  // Spread out, nearly flat, flat, two values, and in steps.
  for (int kind = 0; kind < 5; ++kind) {
    CAPTURE(kind);
    std::vector<std::vector<float>> logits;
    for (int i = 0; i < num_rows; ++i) {
      std::vector<float> row =
          random_logits(kVocab, static_cast<std::uint32_t>(100 * kind + i), kind == 1 ? 0.01F : 1.0F);
      for (float& logit : row) {
        if (kind == 2) logit = 3.0F;
        if (kind == 3) logit = logit > 0 ? 2.0F : 1.0F;
        if (kind == 4) logit = std::round(4 * logit) / 4;
      }
      logits.push_back(std::move(row));
    }
    std::vector<std::int32_t> positions(requests.size(), static_cast<std::int32_t>(requests[0].output.size()));
    const auto tokens = device.step(logits, slots, positions, -1);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CAPTURE(i);
      check_same(tokens[i], sample_on_cpu(logits[i], requests[i]));
      requests[i].output.push_back(tokens[i].token_id);
    }
  }
}

TEST_CASE("logprobs on the device cover far, equal and masked tokens") {
  if (!has_gpu()) return;
  constexpr int kVocab = 5003;
  std::vector<std::vector<float>> logits(4, std::vector<float>(kVocab, 0.0F));
  for (int i = 0; i < kVocab; ++i) logits[0][static_cast<std::size_t>(i)] = -static_cast<float>(i);  // 64 in 64 units
  logits[0][4000] = 500.0F;
  logits[2].assign(kVocab, -kInfinity);
  logits[2][77] = 1.0F, logits[2][3] = 1.0F;
  for (int i = 0; i < kVocab; ++i) logits[3][static_cast<std::size_t>(i)] = static_cast<float>(i % 3) * 200.0F;
  SampledRequest request;
  request.params.logprobs = 64;
  DeviceSteps device(kVocab, 4, 4);
  for (int slot = 0; slot < 4; ++slot) device.set(slot, request);
  const auto tokens = device.step(logits, {0, 1, 2, 3}, {0, 0, 0, 0}, 64);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    CAPTURE(i);
    check_same(tokens[i], sample_on_cpu(logits[i], request));
  }
}

TEST_CASE("rows that are not finite on the device say so and leave the others alone") {
  if (!has_gpu()) return;
  constexpr int kVocab = 9001;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const bool all_greedy : {false, true})
    for (const int at : {0, 4500, kVocab - 1}) {
      CAPTURE(all_greedy);
      CAPTURE(at);
      std::vector<std::vector<float>> logits;
      for (std::uint32_t i = 0; i < 4; ++i) logits.push_back(random_logits(kVocab, i));
      logits[0][static_cast<std::size_t>(at)] = nan;
      logits[1][static_cast<std::size_t>(at)] = kInfinity;
      logits[2].assign(kVocab, -kInfinity);
      SampledRequest request;
      if (all_greedy) request.params.temperature = 0.0F;
      DeviceSteps device(kVocab, 4, 4);
      for (int slot = 0; slot < 4; ++slot) device.set(slot, request);
      const auto tokens = device.step(logits, {0, 1, 2, 3}, {0, 0, 0, 0}, -1, all_greedy);
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK_FALSE(tokens[i].is_finite);
        CHECK(tokens[i].token_id == 0);
      }
      check_same(tokens[3], sample_on_cpu(logits[3], request));
    }

  // Masks that leave nothing.
  SampledRequest request;
  request.params.bad_words = {{1}, {2}};
  request.params.logprobs = 1;
  DeviceSteps device(3, 1, 1);
  device.set(0, request);
  CHECK_FALSE(device.step({{-kInfinity, 1.0F, 2.0F}}, {0}, {0}, 1)[0].is_finite);
}

TEST_CASE("greedy rows give the same token in both kernels of the device sampler") {
  if (!has_gpu()) return;
  SampledRequest greedy;
  greedy.params.temperature = 0.0F;
  for (const int vocab_size : {1, 3, 1023, 30001, 248320}) {
    CAPTURE(vocab_size);
    RandomRequests random(vocab_size, 5);
    DeviceSteps device(vocab_size, 32, 32);
    std::vector<std::vector<float>> logits;
    std::vector<std::int32_t> slots;
    for (int slot = 0; slot < 32; ++slot) {
      device.set(slot, greedy);
      slots.push_back(slot % 9 == 8 ? -1 : slot);
      logits.push_back(random.logits());
    }
    const std::vector<std::int32_t> positions(slots.size(), 0);
    const auto fast = device.step(logits, slots, positions, -1, true), slow = device.step(logits, slots, positions, -1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      CAPTURE(i);
      CHECK(fast[i].token_id == slow[i].token_id);
      CHECK(fast[i].is_finite == slow[i].is_finite);
      if (slots[i] >= 0) check_same(fast[i], sample_on_cpu(logits[i], greedy));
    }
  }
}

TEST_CASE("a row on the device does not depend on the others, nor on the run") {
  if (!has_gpu()) return;
  constexpr int kVocab = 50257, kRows = 40;
  RandomRequests random(kVocab, 9);
  std::vector<SampledRequest> requests;
  std::vector<std::vector<float>> logits;
  std::vector<std::int32_t> slots, positions;
  for (int i = 0; i < kRows; ++i) {
    requests.push_back(random.request());
    requests.back().params.logprobs = 5;
    logits.push_back(random.logits());
    slots.push_back(i);
    positions.push_back(static_cast<std::int32_t>(requests.back().output.size()));
  }
  const auto run = [&](const std::vector<std::size_t>& rows) {
    DeviceSteps device(kVocab, kRows, kRows);
    std::vector<std::vector<float>> some;
    std::vector<std::int32_t> s, p;
    for (const std::size_t row : rows) {
      device.set(slots[row], requests[row]);
      some.push_back(logits[row]), s.push_back(slots[row]), p.push_back(positions[row]);
    }
    return device.step(some, s, p, 5);
  };
  std::vector<std::size_t> all(kRows);
  std::iota(all.begin(), all.end(), std::size_t{0});
  const auto first = run(all), second = run(all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    const auto alone = run({i});
    for (const DeviceToken& other : {second[i], alone[0]}) {
      CHECK(other.token_id == first[i].token_id);
      CHECK(other.logprobs.token_ids == first[i].logprobs.token_ids);
      CHECK(other.logprobs.logprobs == first[i].logprobs.logprobs);
      CHECK(other.logprobs.rank == first[i].logprobs.rank);
    }
  }
}

TEST_CASE("draws on the device follow the softmax") {
  if (!has_gpu()) return;
  constexpr int kVocab = 50, kRows = 1000, kPositions = 40;
  const std::vector<float> row = random_logits(kVocab, 3, 1.5F);
  OwnedRow owned{.logits = row};
  owned.params.temperature = 0.8F;
  const std::vector<double> probabilities = reference_probabilities(owned);
  DeviceSteps device(kVocab, kRows, kRows);
  std::vector<std::int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  for (const std::int32_t slot : slots) {
    SampledRequest request{.params = owned.params};
    request.seed = 1000 + static_cast<std::uint64_t>(slot);
    device.set(slot, request);
  }
  std::vector<double> counts(kVocab);
  const std::vector<std::vector<float>> logits(kRows, row);
  for (int position = 0; position < kPositions; ++position)
    for (const DeviceToken& token : device.step(logits, slots, std::vector<std::int32_t>(kRows, position), -1))
      counts.at(static_cast<std::size_t>(token.token_id)) += 1;
  double statistic = 0;
  for (std::size_t i = 0; i < kVocab; ++i) {
    const double expected = probabilities[i] * kRows * kPositions;
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  CHECK(statistic < 85.4);  // 49 degrees of freedom: 0.1 %
  CHECK(statistic > 23.98);
}

TEST_CASE("D57: rows on the device lie beyond 2^31 elements") {
  if (!has_gpu()) return;
  constexpr std::int64_t kStride = (std::int64_t{1} << 29) + 8;
  constexpr int kVocab = 5000, kRows = 5;
  std::optional<Buffer> buffer;
  try {
    buffer.emplace(static_cast<std::size_t>(kStride * (kRows - 1) + kVocab) * sizeof(float), kGpu);
  } catch (const OutOfMemory&) {
    MESSAGE("skipped: the device has no 9 GB for it");
    return;
  }
  ops::DeviceSampler sampler(kVocab, kRows, kRows, {.device = kGpu});
  std::vector<std::vector<float>> logits;
  SampledRequest request;
  request.params.top_k = 50;
  request.params.frequency_penalty = 1.0F;
  request.output = {1, 2, 3};
  for (std::int64_t row = 0; row < kRows; ++row) {
    logits.push_back(random_logits(kVocab, static_cast<std::uint32_t>(row)));
    cuda::copy_and_wait(static_cast<float*>(buffer->data()) + row * kStride, logits.back().data(),
                        kVocab * sizeof(float));
    sampler.set_request(static_cast<int>(row), request.params, request.prompt, request.output, request.seed);
  }
  Tensor slots(DType::i32, {kRows}), positions(DType::i32, {kRows});
  for (int i = 0; i < kRows; ++i) slots.as<std::int32_t>()[i] = i, positions.as<std::int32_t>()[i] = 3;
  const Tensor slots_gpu = to_gpu(slots), positions_gpu = to_gpu(positions);
  const Tensor tokens(DType::i32, {kRows}, kGpu), finite(DType::u8, {kRows}, kGpu);
  TensorView view = make_view(buffer->data(), DType::f32, {kRows, kVocab}, kGpu);
  view.stride[0] = kStride;
  sampler.sample({.logits = view,
                  .slots = slots_gpu.view(),
                  .output_positions = positions_gpu.view(),
                  .token_ids = tokens.view(),
                  .is_finite = finite.view()});
  const Tensor host = to_host(tokens);
  for (std::size_t row = 0; row < kRows; ++row) {
    CAPTURE(row);
    CHECK(host.as<std::int32_t>()[row] == sample_on_cpu(logits[row], request).token_id);
  }
}

TEST_CASE("the device sampler refuses what does not fit") {
  if (!has_gpu()) return;
  DeviceSteps device(100, 4, 2);
  SampledRequest request;
  CHECK_THROWS_WITH_AS(device.set(4, request), doctest::Contains("slot 4"), InvalidArgument);
  CHECK_THROWS_AS(device.sampler().release(-1), InvalidArgument);
  request.prompt = {100};
  CHECK_THROWS_WITH_AS(device.set(0, request), doctest::Contains("the prompt has token id 100"), InvalidArgument);
  request.prompt.clear(), request.output = {-1};
  CHECK_THROWS_WITH_AS(device.set(0, request), doctest::Contains("the output has token id -1"), InvalidArgument);
  const std::vector<std::vector<float>> row{std::vector<float>(100)};
  CHECK_THROWS_WITH_AS(device.step(row, {0}, {0}, 65), doctest::Contains("num_logprobs"), InvalidArgument);
  CHECK_THROWS_AS(device.step(row, {0}, {0, 0}, -1), InvalidArgument);
  CHECK_THROWS_WITH_AS(device.step(row, {0}, {0}, 0, true), doctest::Contains("all_greedy"), InvalidArgument);
  CHECK_NOTHROW(device.step({}, {}, {}, -1));
  // A released slot is greedy and gives no logprobs.
  request.output.clear(), request.params.logprobs = 1;
  device.set(0, request);
  device.sampler().release(0);
  const DeviceToken token = device.step(row, {0}, {0}, 1)[0];
  CHECK(token.is_finite);
  CHECK(token.logprobs.rank == -77);
}

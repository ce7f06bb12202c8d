#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/stages/streaming_conv.h"

using namespace deltaic;

namespace {

// Weights in memory, and what a layer needs to be read and run.
struct Fixture {
  std::map<std::string, std::vector<float>> memory;
  TensorMap views;
  ThreadPool threads{2};
  ops::Context ctx{.device = {}, .stream = {}, .threads = &threads};
  StateLayout layout;

  std::vector<float>& add(const std::string& name, std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::vector<float>& values = memory[name] = random(count, static_cast<unsigned>(memory.size()));
    views[name] = make_view(values.data(), DType::f32, shape);
    return values;
  }
  static std::vector<float> random(std::int64_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(generator);
    return values;
  }
};

Signal signal(std::int64_t length, std::int64_t channels) {
  Signal x(length, channels);
  x.values = Fixture::random(length * channels, 99);
  return x;
}

Signal part(const Signal& x, std::int64_t begin, std::int64_t end) {
  Signal y(end - begin, x.channels);
  y.values.assign(x.values.begin() + begin * x.channels, x.values.begin() + end * x.channels);
  return y;
}

// The outputs of a stream that comes in pieces of `size` rows.
template <class Layer>
std::vector<float> in_pieces(const Fixture& fixture, const Layer& layer, const Signal& x, std::int64_t size) {
  StreamState state = fixture.layout.make();
  std::vector<float> out;
  for (std::int64_t begin = 0; begin < x.length; begin += size) {
    const Signal y = layer.forward(fixture.ctx, state, part(x, begin, std::min(begin + size, x.length)));
    out.insert(out.end(), y.values.begin(), y.values.end());
  }
  return out;
}

double max_difference(const std::vector<float>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(a[i] - b[i]));
  return most;
}

constexpr std::int64_t kIn = 5, kOut = 3, kLength = 23;

}  // namespace

TEST_CASE("a streaming convolution agrees with the definition, bit for bit in any pieces") {
  for (const auto& [kernel, dilation] : {std::pair{1, 1}, {3, 1}, {7, 1}, {7, 3}, {7, 9}}) {
    CAPTURE(kernel);
    CAPTURE(dilation);
    Fixture fixture;
    const auto& w = fixture.add("c.weight", {kOut, kIn, kernel});
    const auto& b = fixture.add("c.bias", {kOut});
    const Checkpoint checkpoint = Checkpoint::from_memory(fixture.views);
    ViewReader reader(checkpoint);
    const auto conv = StreamingConv::read(reader, fixture.layout, "c", kIn, kOut, kernel, dilation);
    const Signal x = signal(kLength, kIn);
    std::vector<double> expected;
    for (std::int64_t t = 0; t < kLength; ++t)
      for (std::int64_t o = 0; o < kOut; ++o) {
        double sum = b[static_cast<std::size_t>(o)];
        for (std::int64_t j = 0; j < kernel; ++j) {
          const std::int64_t at = t - (kernel - 1 - j) * dilation;
          for (std::int64_t i = 0; i < kIn && at >= 0; ++i)
            sum += double{w[static_cast<std::size_t>((o * kIn + i) * kernel + j)]} *
                   x.values[static_cast<std::size_t>(at * kIn + i)];
        }
        expected.push_back(sum);
      }
    const auto whole = in_pieces(fixture, conv, x, kLength);
    CHECK(max_difference(whole, expected) < 1e-5);
    for (const std::int64_t size : {1, 2, 7, 22}) CHECK(in_pieces(fixture, conv, x, size) == whole);
  }
}

TEST_CASE("a streaming transposed convolution agrees with the definition, with either trimming, in any pieces") {
  for (const auto& [kernel, stride] : {std::pair{2, 2}, {6, 3}, {10, 5}})
    for (const bool trims_left : {false, true}) {
      CAPTURE(stride);
      CAPTURE(trims_left);
      Fixture fixture;
      const auto& w = fixture.add("c.weight", {kIn, kOut, kernel});
      const auto& b = fixture.add("c.bias", {kOut});
      const Checkpoint checkpoint = Checkpoint::from_memory(fixture.views);
      ViewReader reader(checkpoint);
      const auto up = StreamingUpsample::read(reader, fixture.layout, "c", kIn, kOut, kernel, stride, trims_left);
      const Signal x = signal(kLength, kIn);
      const std::int64_t full = (kLength - 1) * stride + kernel, trim = kernel - stride;
      std::vector<double> expected(static_cast<std::size_t>(full * kOut));
      for (std::int64_t m = 0; m < full; ++m)
        for (std::int64_t o = 0; o < kOut; ++o)
          expected[static_cast<std::size_t>(m * kOut + o)] = b[static_cast<std::size_t>(o)];
      for (std::int64_t t = 0; t < kLength; ++t)
        for (std::int64_t j = 0; j < kernel; ++j)
          for (std::int64_t o = 0; o < kOut; ++o)
            for (std::int64_t i = 0; i < kIn; ++i)
              expected[static_cast<std::size_t>((t * stride + j) * kOut + o)] +=
                  double{w[static_cast<std::size_t>((i * kOut + o) * kernel + j)]} *
                  x.values[static_cast<std::size_t>(t * kIn + i)];
      expected.resize(static_cast<std::size_t>((full - trim) * kOut));
      if (trims_left) expected.erase(expected.begin(), expected.begin() + trim * kOut);
      const auto whole = in_pieces(fixture, up, x, kLength);
      CHECK(max_difference(whole, expected) < 1e-5);
      for (const std::int64_t size : {1, 2, 7, 22}) CHECK(in_pieces(fixture, up, x, size) == whole);
    }
}

TEST_CASE("a streaming depthwise convolution agrees with the definition in any pieces") {
  Fixture fixture;
  const auto& w = fixture.add("c.weight", {kIn, 1, 7});
  const auto& b = fixture.add("c.bias", {kIn});
  const Checkpoint checkpoint = Checkpoint::from_memory(fixture.views);
  ViewReader reader(checkpoint);
  const auto conv = StreamingDepthwise::read(reader, fixture.layout, "c", kIn, 7);
  const Signal x = signal(kLength, kIn);
  std::vector<double> expected;
  for (std::int64_t t = 0; t < kLength; ++t)
    for (std::int64_t c = 0; c < kIn; ++c) {
      double sum = b[static_cast<std::size_t>(c)];
      for (std::int64_t j = 0; j < 7; ++j)
        if (t - 6 + j >= 0)
          sum += double{w[static_cast<std::size_t>(c * 7 + j)]} *
                 x.values[static_cast<std::size_t>((t - 6 + j) * kIn + c)];
      expected.push_back(sum);
    }
  const auto whole = in_pieces(fixture, conv, x, kLength);
  CHECK(max_difference(whole, expected) < 1e-5);
  for (const std::int64_t size : {1, 2, 7, 22}) CHECK(in_pieces(fixture, conv, x, size) == whole);
}

TEST_CASE("SnakeBeta agrees with the definition for small and for huge angles") {
  for (const float size : {1.0F, 300.0F, 5000.0F, 1e6F}) {
    CAPTURE(size);
    Fixture fixture;
    const auto alpha = fixture.add("s.alpha", {kIn});
    const auto beta = fixture.add("s.beta", {kIn});
    const Checkpoint checkpoint = Checkpoint::from_memory(fixture.views);
    ViewReader reader(checkpoint);
    const SnakeBeta snake = SnakeBeta::read(reader, "s.", kIn);
    Signal x = signal(kLength, kIn);
    for (float& value : x.values) value *= size;
    const Signal before = x;
    snake.forward(fixture.ctx, x);
    for (std::int64_t t = 0; t < kLength; ++t)
      for (std::int64_t c = 0; c < kIn; ++c) {
        const auto i = static_cast<std::size_t>(t * kIn + c);
        const float scale = std::exp(alpha[static_cast<std::size_t>(c)]);
        const float angle = before.values[i] * scale;  // rounded as f32 arithmetic rounds it
        const double sine = std::sin(double{angle});
        const double bump = sine * sine / (std::exp(double{beta[static_cast<std::size_t>(c)]}) + 1e-9);
        const double expected = before.values[i] + bump;
        // An ulp of f32 of the sum, and the series' error times the largest 1 / (e^beta) here.
        CHECK(std::fabs(x.values[i] - expected) < 1e-5 + 1.2e-7 * std::fabs(expected));
      }
  }
}

// Time to sample one row on one thread. Each case is checked against the slow reference first. The bound is one read of
// the row from memory, at the speed that a plain maximum over it reaches.
//   bench_sampler [vocab_size = 248320] [repeats = 50]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpp/src/ops/logits_row.h"
#include "tests_cpp/ops/sampler_support.h"

using namespace deltaic;

namespace {

struct Case {
  std::string name;
  float sigma = 3;  // of the normal logits
  SamplingParams params{};
};

const std::vector<Case> kCases{
    {"greedy", 3, {.temperature = 0}},
    {"temperature 1", 3, {}},
    {"temperature 1, nearly flat", 0.03F, {}},
    {"top_k 40, top_p 0.9", 3, {.top_p = 0.9F, .top_k = 40}},
    {"top_k 40, top_p 0.9, nearly flat", 0.03F, {.top_p = 0.9F, .top_k = 40}},
    {"top_k 40, top_p 0.9, all penalties",
     3,
     {.top_p = 0.9F, .top_k = 40, .presence_penalty = 1, .frequency_penalty = 1, .repetition_penalty = 1.1F}},
    {"min_p 0.05", 3, {.min_p = 0.05F}},
    {"top_p 0.9", 3, {.top_p = 0.9F}},
    {"top_p 0.9, peaked", 6, {.top_p = 0.9F}},
    {"top_p 0.9, nearly flat", 0.03F, {.top_p = 0.9F}},
    {"greedy, 5 logprobs", 3, {.temperature = 0, .logprobs = 5}},
    {"greedy, all logprobs", 3, {.temperature = 0, .logprobs = -1}},
};

template <class Body>
double time_ms(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double quantile(std::vector<double> times, double share) {
  std::sort(times.begin(), times.end());
  return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
}

// Writes over more than the last-level cache's share of a core, so that the row comes from memory.
void flush_caches(std::vector<char>& scratch) {
  for (std::size_t i = 0; i < scratch.size(); i += 64) ++scratch[i];
}

bool run(const Case& c, std::size_t vocab_size, int repeats, double bound_ms, std::vector<char>& scratch) {
  test::OwnedRow row{.logits = test::random_logits(vocab_size, 1, c.sigma), .params = c.params};
  for (std::size_t i = 0; i < 4000; ++i) row.prompt.push_back(static_cast<std::int32_t>(i * 61 % vocab_size));
  for (std::size_t i = 0; i < 500; ++i) row.output.push_back(static_cast<std::int32_t>(i * 17 % vocab_size));
  std::vector<double> times;
  for (int repeat = -3; repeat < repeats; ++repeat) {
    row.seed = static_cast<std::uint64_t>(repeat + 3);
    test::OwnedRow copy = row;
    const ops::SamplerRow view = copy.view();
    flush_caches(scratch);
    std::vector<ops::SampledToken> sampled;
    const double elapsed = time_ms([&] { sampled = ops::sample({}, {&view, 1}); });
    if (repeat < 0) {
      if (sampled.front().token_id == test::reference_token(row)) continue;
      std::printf("%-36s differs from the reference\n", c.name.c_str());
      return false;
    }
    times.push_back(elapsed);
  }
  const double median = quantile(times, 0.5);
  std::printf("%-36s %8.3f %8.3f %8.3f %7.1f %%\n", c.name.c_str(), median, quantile(times, 0.1), quantile(times, 0.9),
              100 * bound_ms / median);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t vocab_size = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 248320;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 50;
  if (vocab_size == 0 || repeats < 1) {
    std::fprintf(stderr, "vocab_size and repeats must be > 0\n");
    return 2;
  }
  std::vector<char> scratch(64U << 20);
  const std::vector<float> logits = test::random_logits(vocab_size, 1);
  std::vector<double> bounds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    flush_caches(scratch);
    float max = 0;
    bounds.push_back(time_ms([&] { max = ops::row_max(logits).value; }));
    if (max <= 0) return 1;
  }
  const double bound_ms = quantile(bounds, 0.5);
  std::printf("vocabulary %zu, %d repeats, one read of the row %.3f ms\n", vocab_size, repeats, bound_ms);
  std::printf("%-36s %8s %8s %8s %9s\n", "one row, ms", "median", "p10", "p90", "of bound");
  bool all_agree = true;
  for (const Case& c : kCases) all_agree = run(c, vocab_size, repeats, bound_ms, scratch) && all_agree;
  return all_agree ? 0 : 1;
}

// CPU time of the CacheManager (one thread, so that a busy machine does not matter): a long prompt from arrival to its
// second hit, and the calls of a decode step.
//   bench_cache_manager [num_tokens = 100000] [repeats = 15]

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <deltaic/cache.h>

using namespace deltaic;

namespace {

constexpr int kMambaBlock = 256;

double now_us() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

template <class Body>
double time_us(Body&& body) {
  const double start = now_us();
  body();
  return now_us() - start;
}

void print(const std::string& what, std::vector<double> times, const char* unit) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
  };
  std::printf("  %-44s %9.1f %s  (%.1f to %.1f)\n", what.c_str(), at(0.5), unit, at(0.1), at(0.9));
}

std::vector<std::int32_t> random_tokens(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 150'000);
  return tokens;
}

// The pool is full of other cached prefixes, so every new block evicts one.
bool long_prompt(int num_tokens, int repeats) {
  const std::vector<std::int32_t> tokens = random_tokens(num_tokens, 0);
  const int boundary = (num_tokens - 1) / kMambaBlock * kMambaBlock;
  std::map<std::string, std::vector<double>> times;
  for (int i = 0; i < repeats; ++i) {
    const int blocks_each = num_tokens / 16 + 1;
    CacheManager cache({.num_blocks = 16 * blocks_each, .mamba_block_size = kMambaBlock, .num_snapshot_slots = 64});
    for (unsigned other = 1; other <= 17; ++other) {
      cache.add_request("other", random_tokens(num_tokens, other));
      if (!cache.admit("other", {}, num_tokens)) return false;
      cache.publish("other", num_tokens);
      cache.remove_request("other");
    }
    PrefixHit hit;
    const auto time = [&](const char* what, auto&& body) { times[what].push_back(time_us(body)); };
    time("1 add_request", [&] { cache.add_request("a", tokens); });
    time("2 find_prefix, no hit", [&] { hit = cache.find_prefix("a"); });
    time("3 admit, each block evicts another", [&] { (void)cache.admit("a", {}, num_tokens); });
    const bool reserved = cache.reserve_snapshot("a", boundary).has_value();
    time("4 publish", [&] { cache.publish("a", num_tokens); });
    if (!reserved || hit.num_attention_tokens != 0) return false;
    cache.publish_snapshot("a", boundary);
    cache.add_request("b", tokens);
    time("5 find_prefix, all hit", [&] { hit = cache.find_prefix("b"); });
    if (hit.num_tokens != boundary) return false;
    time("6 admit, all hit", [&] { (void)cache.admit("b", hit, num_tokens); });
    time("7 remove_request", [&] { cache.remove_request("b"); });
  }
  std::printf("%d tokens, blocks of 16, us:\n", num_tokens);
  for (const auto& [what, samples] : times) print(what, samples, "us");
  return true;
}

bool decode(int repeats) {
  constexpr int kNumRequests = 128, kPrompt = 1000, kSteps = 512;
  std::vector<double> all, idle;
  for (int i = 0; i < repeats; ++i) {
    CacheManager cache({.num_blocks = 20'000, .mamba_block_size = kMambaBlock, .num_snapshot_slots = 256});
    std::vector<std::string> ids;
    for (int r = 0; r < kNumRequests; ++r) {
      ids.push_back("request-" + std::to_string(r));
      cache.add_request(ids.back(), random_tokens(kPrompt + 1, static_cast<unsigned>(r)));
      if (!cache.admit(ids.back(), {}, kPrompt)) return false;
      cache.publish(ids.back(), kPrompt);
    }
    const double total_us = time_us([&] {
      for (int end = kPrompt + 1; end <= kPrompt + kSteps; ++end)
        for (const std::string& id : ids) {
          (void)cache.extend(id, end);
          const bool takes_snapshot = end % kMambaBlock == 0 && cache.reserve_snapshot(id, end);
          cache.publish(id, end);
          if (takes_snapshot) cache.publish_snapshot(id, end);
          cache.append_tokens(id, std::span<const std::int32_t>(&end, 1));
        }
    });
    all.push_back(1000 * total_us / (kSteps * kNumRequests));
    const double idle_us = time_us([&] {
      for (int step = 0; step < kSteps; ++step)
        for (const std::string& id : ids) {
          (void)cache.extend(id, kPrompt + kSteps);
          cache.publish(id, kPrompt + kSteps);
        }
    });
    idle.push_back(1000 * idle_us / (kSteps * kNumRequests));
    if (cache.num_cached_snapshots() != kNumRequests) return false;
  }
  std::printf("decode, %d requests, ns a request and step:\n", kNumRequests);
  print("extend, publish, append, boundaries included", all, "ns");
  print("extend, publish where nothing is crossed", idle, "ns");
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_tokens = argc > 1 ? std::atoi(argv[1]) : 100'000;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 15;
  if (num_tokens <= kMambaBlock || repeats < 1) {
    std::fprintf(stderr, "num_tokens must be over %d, repeats at least 1\n", kMambaBlock);
    return 2;
  }
  if (long_prompt(num_tokens, repeats) && decode(repeats)) return 0;
  std::fprintf(stderr, "the CacheManager did not answer as it should\n");
  return 1;
}

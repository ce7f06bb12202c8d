#include <random>

#include <deltaic/cache.h>
#include <doctest/doctest.h>

#include "tests_cpp/cache/slow_cache.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

// Drives a CacheManager and a SlowCache with the same random calls, in any order that the contract allows.
class Driver {
 public:
  Driver(const CacheManager::Options& options, unsigned seed) : random_(seed), cache_(options), slow_(options) {}

  void step() {
    if (slow_.requests.size() < 6 && draw(3) == 0) return add();
    if (slow_.requests.empty()) return;
    auto found = slow_.requests.begin();
    std::advance(found, draw(static_cast<int>(slow_.requests.size())));
    const std::string& id = found->first;
    SlowCache::Request& request = found->second;
    switch (draw(10)) {
      case 0:
      case 1:
        return request.is_admitted ? extend(id, request) : admit(id, request);
      case 2:
      case 3: {
        const SlowCache::Tokens added = random_tokens(1 + draw(5));
        cache_.append_tokens(id, added);
        request.tokens.insert(request.tokens.end(), added.begin(), added.end());
        return;
      }
      case 4:
      case 5: {
        const int computed = draw(held_tokens(request) + 1);
        cache_.publish(id, computed);
        slow_.publish(request, computed);
        return;
      }
      case 6:
        return reserve(id, request);
      case 7:
        return settle_snapshot(id, request);
      case 8:
        if (draw(4) > 0) return;
        cache_.release(id);
        slow_.release(request);
        return;
      default:
        if (draw(3) > 0) return;
        if (request.tokens.size() > 8) old_.push_back(request.tokens);
        cache_.remove_request(id);
        slow_.release(request);
        slow_.requests.erase(found);
        if (draw(40) == 0) reset();
    }
  }

  void check() const {
    std::set<int> held;
    for (const auto& [id, request] : slow_.requests) {
      for (std::size_t i = 0; i < request.blocks.size(); ++i) {
        held.insert(request.blocks[i]);
        REQUIRE(request.blocks[i] != 0);
        const bool is_writable = static_cast<int>(i) >= request.num_published;
        if (is_writable) REQUIRE(slow_.owners(request.blocks[i]) == 1);
      }
      const PrefixHit expected = slow_.find_prefix(request), hit = cache_.find_prefix(id);
      REQUIRE(hit.num_attention_tokens == expected.num_attention_tokens);
      REQUIRE(hit.num_tokens == expected.num_tokens);
      REQUIRE(hit.snapshot_slot == expected.snapshot_slot);
      num_hits_ += hit.num_tokens > 0;
    }
    std::size_t num_reserved = 0;
    for (const auto& [id, request] : slow_.requests) num_reserved += request.reserved.size();
    const auto num_blocks = static_cast<std::size_t>(cache_.num_total_blocks());
    REQUIRE(cache_.num_free_blocks() == static_cast<std::int64_t>(num_blocks - held.size()));
    REQUIRE(slow_.free.size() == num_blocks - held.size());
    REQUIRE(cache_.num_cached_blocks() == static_cast<std::int64_t>(slow_.contents.size()));
    REQUIRE(cache_.num_cached_snapshots() == static_cast<int>(slow_.snapshots.size()));
    REQUIRE(cache_.num_free_snapshot_slots() == cache_.options().num_snapshot_slots - static_cast<int>(num_reserved));
  }

  const CacheStats& stats() const { return cache_.stats(); }
  int num_hits() const { return num_hits_; }
  int num_refusals() const { return num_refusals_; }

 private:
  int draw(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  int held_tokens(const SlowCache::Request& request) const {
    return static_cast<int>(request.blocks.size()) * slow_.options.block_size;
  }
  // Two token ids, so that sequences meet by chance too.
  SlowCache::Tokens random_tokens(int count) {
    SlowCache::Tokens tokens(static_cast<std::size_t>(count));
    for (auto& token : tokens) token = draw(8) == 0;
    return tokens;
  }

  void add() {
    SlowCache::Request request;
    if (!old_.empty() && draw(4) > 0) {
      request.tokens = old_[static_cast<std::size_t>(draw(static_cast<int>(old_.size())))];
      if (draw(2) == 0) request.tokens.resize(static_cast<std::size_t>(draw(static_cast<int>(request.tokens.size()))));
    }
    const SlowCache::Tokens rest = random_tokens(draw(20));
    request.tokens.insert(request.tokens.end(), rest.begin(), rest.end());
    if (request.tokens.size() > 60) request.tokens.resize(60);
    request.salt = draw(5) == 0 ? "other" : "";
    request.num_prompt_tokens = request.tokens.size();
    const std::string id = std::to_string(++num_requests_);
    cache_.add_request(id, request.tokens, request.salt);
    slow_.requests[id] = request;
  }
  void admit(const std::string& id, SlowCache::Request& request) {
    const PrefixHit hit = draw(5) == 0 ? PrefixHit{} : cache_.find_prefix(id);
    const int num_tokens = hit.num_tokens + draw(static_cast<int>(request.tokens.size()) - hit.num_tokens + 4);
    const auto expected = slow_.admit(request, hit, num_tokens);
    num_refusals_ += !expected.has_value();
    REQUIRE(cache_.admit(id, hit, num_tokens) == expected);
  }
  void extend(const std::string& id, SlowCache::Request& request) {
    const int num_tokens = draw(static_cast<int>(request.tokens.size()) + 4);
    const auto expected = slow_.extend(request, num_tokens);
    num_refusals_ += !expected.has_value();
    REQUIRE(cache_.extend(id, num_tokens) == expected);
  }
  void reserve(const std::string& id, SlowCache::Request& request) {
    if (slow_.options.mamba_block_size == 0) return;
    const int max_snapshots = held_tokens(request) / slow_.options.mamba_block_size;
    if (max_snapshots == 0) return;
    const int num_tokens = (1 + draw(max_snapshots)) * slow_.options.mamba_block_size;
    const std::set<int> allowed = slow_.slots_for(request, num_tokens);
    const auto slot = cache_.reserve_snapshot(id, num_tokens);
    REQUIRE(slot.has_value() == !allowed.empty());
    if (!slot) return;
    REQUIRE(allowed.contains(*slot));
    slow_.reserve(request, num_tokens, *slot);
  }
  void settle_snapshot(const std::string& id, SlowCache::Request& request) {
    if (request.reserved.empty()) return;
    const int num_tokens = request.reserved.begin()->first;
    if (num_tokens <= request.num_published * slow_.options.block_size) {
      cache_.publish_snapshot(id, num_tokens);
      slow_.publish_snapshot(request, num_tokens);
    } else if (draw(2) == 0) {
      cache_.cancel_snapshot(id, num_tokens);
      request.reserved.erase(num_tokens);
    }
  }
  void reset() {
    const bool idle = std::ranges::all_of(slow_.requests, [](const auto& r) { return r.second.blocks.empty(); });
    REQUIRE(cache_.reset_prefix_cache() == idle);
    if (idle) slow_.reset();
  }

  std::mt19937 random_;
  CacheManager cache_;
  SlowCache slow_;
  std::vector<SlowCache::Tokens> old_;
  int num_requests_ = 0, num_refusals_ = 0;
  mutable int num_hits_ = 0;
};

}  // namespace

TEST_CASE("CacheManager answers as the slow model does, call for call") {
  struct Case {
    int num_blocks, mamba_block_size, num_snapshot_slots;
  };
  for (const auto& [num_blocks, mamba_block_size, num_snapshot_slots] :
       {Case{40, 0, 0}, Case{24, 8, 3}, Case{40, 8, 5}, Case{80, 4, 6}, Case{200, 16, 2}})
    for (const unsigned seed : {1, 2, 3}) {
      CAPTURE(num_blocks);
      CAPTURE(mamba_block_size);
      CAPTURE(seed);
      Driver driver({.num_blocks = num_blocks,
                     .block_size = 4,
                     .mamba_block_size = mamba_block_size,
                     .num_snapshot_slots = num_snapshot_slots,
                     .first_snapshot_slot = 3},
                    seed);
      for (int i = 0; i < 4000; ++i) {
        CAPTURE(i);
        driver.step();
        driver.check();
      }
      // The run has met what it is there for.
      CHECK(driver.num_hits() > 500);
      CHECK(driver.stats().num_evicted_blocks > 20);
      if (num_blocks < 80) CHECK(driver.num_refusals() > 10);
      if (mamba_block_size > 0) {
        CHECK(driver.stats().num_snapshots > 30);
        CHECK(driver.stats().num_evicted_snapshots > 5);
      }
    }
}

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include <deltaic/cache.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "tests_cpp/cache/support.h"

using namespace deltaic;
using namespace deltaic::test;

// Attention blocks alone; snapshots are in test_snapshots.cpp.

TEST_CASE("a finished request's full blocks are hit, at most num_tokens - 1 of them") {
  CacheManager cache({.num_blocks = 64});
  run(cache, "a", tokens(50));
  for (const auto& [num_tokens, expected] :
       {std::pair{0, 0}, {1, 0}, {16, 0}, {17, 16}, {32, 16}, {33, 32}, {48, 32}, {49, 48}, {50, 48}, {80, 48}}) {
    CAPTURE(num_tokens);
    cache.add_request("b", tokens(num_tokens));
    const PrefixHit hit = cache.find_prefix("b");
    CHECK(hit.num_tokens == expected);
    CHECK(hit.num_attention_tokens == expected);
    CHECK(hit.snapshot_slot == -1);
    cache.remove_request("b");
  }
}

TEST_CASE("a hit shares the published blocks and nothing else") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(50));
  const auto a = *cache.admit("a", {}, 50);
  cache.publish("a", 50);
  auto longer = tokens(48);
  longer.resize(60, 7);
  cache.add_request("b", longer);
  const PrefixHit hit = cache.find_prefix("b");
  CHECK(hit.num_tokens == 48);
  const auto b = *cache.admit("b", hit, 60);
  CHECK(std::vector(b.begin(), b.begin() + 3) == std::vector(a.begin(), a.begin() + 3));
  CHECK(b[3] != a[3]);
  CHECK(cache.num_free_blocks() == 63 - 5);
}

TEST_CASE("another salt never hits") {
  CacheManager cache({.num_blocks = 64});
  run(cache, "a", tokens(50), "tenant 1");
  cache.add_request("b", tokens(50), "tenant 2");
  cache.add_request("c", tokens(50));
  cache.add_request("d", tokens(50), "tenant 1");
  CHECK(cache.find_prefix("b").num_tokens == 0);
  CHECK(cache.find_prefix("c").num_tokens == 0);
  CHECK(cache.find_prefix("d").num_tokens == 48);
}

TEST_CASE("tokens that are not known yet are never published") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(31));
  REQUIRE(cache.admit("a", {}, 40));
  cache.publish("a", 35);  // a sampled token and drafts
  CHECK(cache.num_cached_blocks() == 1);
  cache.append_tokens("a", tokens(2, 31));
  cache.publish("a", 31);  // known, not computed
  CHECK(cache.num_cached_blocks() == 1);
  cache.publish("a", 33);
  CHECK(cache.num_cached_blocks() == 2);
  cache.add_request("b", tokens(40));
  CHECK(cache.find_prefix("b").num_tokens == 32);
}

TEST_CASE("D25: what a step computes is not hit by a request admitted to the same step") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(37));
  cache.add_request("b", tokens(37));
  REQUIRE(cache.admit("a", {}, 37));
  CHECK(cache.find_prefix("b").num_tokens == 0);
  CHECK(cache.find_prefix("b").num_attention_tokens == 0);
  REQUIRE(cache.admit("b", cache.find_prefix("b"), 37));
  cache.publish("a", 37);
  cache.publish("b", 37);
  cache.add_request("c", tokens(37));
  CHECK(cache.find_prefix("c").num_tokens == 32);
}

TEST_CASE("blocks of the same content: all in use, or one that is free") {
  CacheManager cache({.num_blocks = 10});
  for (const char* id : {"a", "b", "c"}) {
    cache.add_request(id, tokens(33));
    REQUIRE(cache.admit(id, {}, 33));
  }
  for (const char* id : {"a", "b", "c"}) cache.publish(id, 33);
  CHECK(cache.num_cached_blocks() == 6);
  cache.remove_request("b");
  CHECK(cache.num_cached_blocks() == 4);
  cache.remove_request("a");
  cache.remove_request("c");
  CHECK(cache.num_cached_blocks() == 2);
  // Computed once more without a hit: the free one makes way.
  cache.add_request("d", tokens(33));
  REQUIRE(cache.admit("d", {}, 33));
  cache.publish("d", 33);
  CHECK(cache.num_cached_blocks() == 2);
  cache.add_request("e", tokens(33));
  const auto e = *cache.admit("e", cache.find_prefix("e"), 33);
  CHECK(cache.num_free_blocks() == 9 - 4);  // d's 3, of which e shares 2, and e's own
  CHECK(cache.stats().num_evicted_blocks == 0);
}

TEST_CASE("D32: an allocation never evicts a block that was just hit") {
  CacheManager cache({.num_blocks = 7});
  run(cache, "a", tokens(33));  // 2 cached blocks, then the oldest free ones
  run(cache, "b", tokens(49, 1000));
  // 2 free hits and 4 new ones: all of the pool.
  cache.add_request("c", tokens(96));
  const PrefixHit hit = cache.find_prefix("c");
  REQUIRE(hit.num_tokens == 32);
  const auto blocks = cache.admit("c", hit, 96);
  REQUIRE(blocks);
  CHECK(std::set<int>(blocks->begin(), blocks->end()).size() == 6);
  cache.publish("c", 96);
  CHECK(cache.num_free_blocks() == 0);
  cache.remove_request("c");
  cache.add_request("d", tokens(97));
  CHECK(cache.find_prefix("d").num_tokens == 96);
}

TEST_CASE("D80: an allocation that fails changes nothing") {
  CacheManager cache({.num_blocks = 7});
  run(cache, "a", tokens(33));
  cache.add_request("b", tokens(112));
  const PrefixHit hit = cache.find_prefix("b");
  REQUIRE(hit.num_tokens == 32);
  CHECK_FALSE(cache.admit("b", hit, 97));  // 2 hits + 5 new ones of 4
  CHECK(cache.num_free_blocks() == 6);
  CHECK(cache.num_cached_blocks() == 2);
  CHECK(cache.stats().num_queries == 1);
  CHECK(cache.find_prefix("b").num_tokens == 32);
  REQUIRE(cache.admit("b", hit, 96));
  CHECK_FALSE(cache.extend("b", 97));
  CHECK(cache.num_free_blocks() == 0);
  CHECK(cache.extend("b", 96)->empty());
  cache.release("b");
  CHECK(cache.num_free_blocks() == 6);
}

TEST_CASE("a free hit counts as a block that is taken") {
  CacheManager cache({.num_blocks = 4});
  run(cache, "a", tokens(33));
  cache.add_request("b", tokens(33));
  REQUIRE(cache.admit("b", {}, 16));  // 2 free: both hits
  cache.add_request("c", tokens(48));
  const PrefixHit hit = cache.find_prefix("c");
  REQUIRE(hit.num_tokens == 32);
  CHECK_FALSE(cache.admit("c", hit, 33));
  CHECK(cache.admit("c", hit, 32));
}

TEST_CASE("D29: fewer tokens than before need no block") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(30));
  REQUIRE(cache.admit("a", {}, 30)->size() == 2);
  CHECK(cache.extend("a", 31 + 16)->size() == 1);  // 16 drafts
  CHECK(cache.extend("a", 32 + 1)->empty());
  CHECK(cache.extend("a", 0)->empty());
  CHECK(cache.extend("a", 49)->size() == 1);
}

TEST_CASE("D28: publishing skips no block and needs none") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(55));
  REQUIRE(cache.admit("a", {}, 55)->size() == 4);
  cache.publish("a", 0);
  cache.publish("a", 55);
  cache.publish("a", 20);  // less than before
  CHECK(cache.num_cached_blocks() == 3);
}

TEST_CASE("D74: capacity is num_blocks - 1") {
  const CacheManager cache({.num_blocks = 64});
  CHECK(cache.num_total_blocks() == 63);
  CHECK(cache.num_free_blocks() == 63);
  CHECK_FALSE(cache.can_ever_fit(1009));
  CHECK_FALSE(cache.can_ever_fit(1024));
  CHECK(cache.can_ever_fit(1008));
  CHECK(cache.can_ever_fit(0));
  CHECK_FALSE(CacheManager({.num_blocks = 32}).can_ever_fit(512));
  CHECK(CacheManager({.num_blocks = 33}).can_ever_fit(512));
}

TEST_CASE("D77: whatever the state of a request, removing it gives all blocks back") {
  CacheManager cache({.num_blocks = 64});
  cache.remove_request("unknown");
  cache.add_request("waiting", tokens(40));
  cache.remove_request("waiting");
  cache.add_request("prefill", tokens(40));
  REQUIRE(cache.admit("prefill", {}, 20));
  cache.publish("prefill", 20);
  cache.remove_request("prefill");
  run(cache, "finished", tokens(40));
  cache.remove_request("finished");
  CHECK(cache.num_free_blocks() == 63);
  cache.add_request("prefill", tokens(40));  // the id is free again
}

TEST_CASE("a preempted request hits what it had published") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(40));
  REQUIRE(cache.admit("a", {}, 40));
  cache.publish("a", 40);
  cache.append_tokens("a", tokens(10, 40));
  REQUIRE(cache.extend("a", 50));
  cache.publish("a", 49);
  cache.release("a");
  CHECK(cache.num_free_blocks() == 63);
  const PrefixHit hit = cache.find_prefix("a");
  CHECK(hit.num_tokens == 48);
  REQUIRE(cache.admit("a", hit, 50));
  cache.publish("a", 50);
  CHECK(cache.num_cached_blocks() == 3);
}

TEST_CASE("D30: the prefix cache is forgotten only when nobody holds a block") {
  CacheManager cache({.num_blocks = 64});
  for (const char* id : {"a", "b", "c"}) {
    cache.add_request(id, tokens(80, id[0] * 1000));
    REQUIRE(cache.admit(id, {}, 80)->size() == 5);
    cache.publish(id, 80);
  }
  CHECK_FALSE(cache.reset_prefix_cache());
  CHECK(cache.num_cached_blocks() == 15);
  for (const char* id : {"a", "b", "c"}) cache.release(id);
  CHECK(cache.reset_prefix_cache());
  CHECK(cache.num_cached_blocks() == 0);
  CHECK(cache.num_free_blocks() == 63);
  for (const char* id : {"a", "b", "c"}) {
    CHECK(cache.find_prefix(id).num_attention_tokens == 0);
    REQUIRE(cache.admit(id, {}, 81)->size() == 6);
    cache.publish(id, 80);
  }
  CHECK(cache.num_cached_blocks() == 15);
}

TEST_CASE("without prefix caching nothing is hit, and D78: blocks are reused last freed first") {
  CacheManager cache({.num_blocks = 64, .enable_prefix_caching = false});
  cache.add_request("a", tokens(48));
  const auto blocks = *cache.admit("a", {}, 48);
  cache.publish("a", 48);
  cache.remove_request("a");
  CHECK(cache.num_cached_blocks() == 0);
  cache.add_request("b", tokens(48));
  CHECK(cache.find_prefix("b").num_attention_tokens == 0);
  CHECK(*cache.admit("b", {}, 48) == blocks);
  CHECK(cache.stats().num_hit_tokens == 0);
}

TEST_CASE("the head of a sequence outlives its tail") {
  CacheManager cache({.num_blocks = 9});
  run(cache, "a", tokens(128));
  CHECK(cache.num_cached_blocks() == 8);
  cache.add_request("b", tokens(48, 5000));
  REQUIRE(cache.admit("b", {}, 48));
  cache.add_request("c", tokens(129));
  CHECK(cache.find_prefix("c").num_tokens == 80);
  CHECK(cache.stats().num_evicted_blocks == 3);
}

TEST_CASE("counters count admissions") {
  CacheManager cache({.num_blocks = 64});
  run(cache, "a", tokens(40));
  run(cache, "b", tokens(40));
  cache.add_request("c", tokens(40));
  cache.find_prefix("c");  // not admitted
  CHECK(cache.stats().num_queries == 2);
  CHECK(cache.stats().num_query_tokens == 80);
  CHECK(cache.stats().num_hit_tokens == 32);
}

TEST_CASE("misuse is refused with the numbers") {
  CacheManager cache({.num_blocks = 64});
  CHECK_THROWS_WITH_AS(cache.find_prefix("x"), "unknown request 'x'", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.append_tokens("x", {}), "unknown request 'x'", InvalidArgument);
  CHECK_THROWS_AS(cache.admit("x", {}, 1), InvalidArgument);
  CHECK_THROWS_AS(cache.extend("x", 1), InvalidArgument);
  CHECK_THROWS_AS(cache.publish("x", 1), InvalidArgument);
  CHECK_THROWS_AS(cache.release("x"), InvalidArgument);
  cache.add_request("x", tokens(40));
  CHECK_THROWS_WITH_AS(cache.add_request("x", tokens(1)), "request 'x' is registered already", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.extend("x", 1), "request 'x' is not admitted", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.publish("x", 1), "request 'x' holds 0 blocks of 16 tokens, cannot have computed 1",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.admit("x", {}, -1), "num_tokens is -1, less than the hit of 0", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.admit("x", {.num_tokens = 16}, 40),
                       "the hit of request 'x' is stale at token 0 of 16: call find_prefix again", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.admit("x", {.num_tokens = 48}, 48),
                       "request 'x' has 40 tokens, its hit 48, which find_prefix cannot have returned",
                       InvalidArgument);
  REQUIRE(cache.admit("x", {}, 40));
  CHECK_THROWS_WITH_AS(cache.admit("x", {}, 40), "request 'x' is admitted already: release it first", InvalidArgument);
  CHECK_THROWS_AS(cache.reserve_snapshot("x", 16), InvalidArgument);
  CHECK(cache.num_free_blocks() == 60);

  CHECK_THROWS_WITH_AS(CacheManager({.num_blocks = 1}),
                       "num_blocks is 1, want 2 to 2147483646 (block 0 is never handed out)", InvalidArgument);
  CHECK_THROWS_AS(CacheManager({.num_blocks = 64, .block_size = 0}), InvalidArgument);
  CHECK_THROWS_WITH_AS(CacheManager({.num_blocks = 64, .mamba_block_size = 24}),
                       "mamba_block_size is 24, want a multiple of block_size 16", InvalidArgument);
  CHECK_THROWS_AS(CacheManager({.num_blocks = 64, .num_snapshot_slots = -1}), InvalidArgument);
  CHECK_THROWS_AS(CacheManager({.num_blocks = 64, .first_snapshot_slot = -1}), InvalidArgument);
}

TEST_CASE("a moved manager keeps its requests") {
  CacheManager cache({.num_blocks = 64});
  cache.add_request("a", tokens(20));
  REQUIRE(cache.admit("a", {}, 32));
  CacheManager moved = std::move(cache);
  moved.append_tokens("a", tokens(12, 20));
  moved.publish("a", 32);
  CHECK(moved.num_cached_blocks() == 2);
}

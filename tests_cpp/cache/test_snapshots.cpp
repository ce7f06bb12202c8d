#include <algorithm>
#include <string>
#include <vector>

#include <deltaic/cache.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "tests_cpp/cache/support.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

constexpr int kBlock = 64;  // mamba_block_size; attention blocks have 16 tokens

CacheManager make_cache(int num_snapshot_slots = 4, std::int64_t num_blocks = 256) {
  return CacheManager({.num_blocks = num_blocks,
                       .mamba_block_size = kBlock,
                       .num_snapshot_slots = num_snapshot_slots,
                       .first_snapshot_slot = 10});
}

// Computes a request's known tokens in one step and takes the snapshots. Leaves it admitted.
PrefixHit compute(CacheManager& cache, const std::string& req_id, const std::vector<std::int32_t>& token_ids,
                  const std::vector<int>& snapshots) {
  cache.add_request(req_id, token_ids);
  const PrefixHit hit = cache.find_prefix(req_id);
  REQUIRE(cache.admit(req_id, hit, static_cast<int>(token_ids.size())));
  for (const int num_tokens : snapshots) REQUIRE(cache.reserve_snapshot(req_id, num_tokens));
  cache.publish(req_id, static_cast<int>(token_ids.size()));
  for (const int num_tokens : snapshots) cache.publish_snapshot(req_id, num_tokens);
  return hit;
}

void compute_and_finish(CacheManager& cache, const std::string& req_id, const std::vector<std::int32_t>& token_ids,
                        const std::vector<int>& snapshots) {
  compute(cache, req_id, token_ids, snapshots);
  cache.remove_request(req_id);
}

PrefixHit find(CacheManager& cache, const std::vector<std::int32_t>& token_ids) {
  cache.add_request("probe", token_ids);
  const PrefixHit hit = cache.find_prefix("probe");
  cache.remove_request("probe");
  return hit;
}

// Generates up to num_tokens, one token a step, with a snapshot at every boundary, as a scheduler does.
void decode(CacheManager& cache, const std::string& req_id, int from, int to) {
  for (int computed = from; computed < to; ++computed) {
    const int end = computed + 1;
    REQUIRE(cache.extend(req_id, end));
    const bool boundary = end % kBlock == 0 && cache.reserve_snapshot(req_id, end);
    cache.publish(req_id, end);
    if (boundary) cache.publish_snapshot(req_id, end);
    cache.append_tokens(req_id, tokens(1, end));
  }
}

}  // namespace

TEST_CASE("a hit needs the K/V blocks and a snapshot at the same token count") {
  CacheManager cache = make_cache();
  compute_and_finish(cache, "a", tokens(200), {128});
  const PrefixHit hit = find(cache, tokens(200));
  CHECK(hit.num_tokens == 128);
  CHECK(hit.num_attention_tokens == 192);
  CHECK(hit.snapshot_slot == 10);
  CHECK(find(cache, tokens(129)).num_tokens == 128);
  // The state after 128 tokens is of no use when the 128th must be computed.
  CHECK(find(cache, tokens(128)).num_tokens == 0);
  CHECK(find(cache, tokens(128)).snapshot_slot == -1);
  auto other = tokens(200);
  other[100] = 7;
  CHECK(find(cache, other).num_tokens == 0);
  CHECK(find(cache, other).num_attention_tokens == 96);
}

TEST_CASE("D25: a snapshot is hit from the step after the one that takes it") {
  CacheManager cache = make_cache();
  cache.add_request("a", tokens(133));
  cache.add_request("b", tokens(133));
  REQUIRE(cache.admit("a", {}, 133));
  REQUIRE(cache.reserve_snapshot("a", 128));
  CHECK(cache.find_prefix("b").num_tokens == 0);
  REQUIRE(cache.admit("b", {}, 133));
  CHECK_FALSE(cache.reserve_snapshot("b", 128));  // a takes it
  cache.publish("a", 133);
  CHECK(find(cache, tokens(133)).num_tokens == 0);
  CHECK(find(cache, tokens(133)).num_attention_tokens == 128);
  cache.publish_snapshot("a", 128);
  CHECK(find(cache, tokens(133)).num_tokens == 128);
  CHECK_FALSE(cache.reserve_snapshot("b", 128));
}

TEST_CASE("D26: attention and recurrent layers agree on the hit, drafts or not") {
  for (const int rest : {0, 1, kBlock - 1}) {
    CAPTURE(rest);
    CacheManager cache = make_cache();
    const int num_tokens = 3 * kBlock + rest, last_boundary = (num_tokens - 1) / kBlock * kBlock;
    cache.add_request("a", tokens(num_tokens));
    REQUIRE(cache.admit("a", {}, num_tokens + 3));  // three drafts
    REQUIRE(cache.reserve_snapshot("a", last_boundary));
    cache.publish("a", num_tokens + 3);
    cache.publish_snapshot("a", last_boundary);
    cache.remove_request("a");
    const PrefixHit hit = find(cache, tokens(num_tokens));
    CHECK(hit.num_tokens == last_boundary);
    CHECK(hit.num_attention_tokens >= hit.num_tokens);
    CHECK(hit.num_attention_tokens < num_tokens);
  }
}

TEST_CASE("D31: K/V blocks without a snapshot are no hit") {
  CacheManager cache = make_cache(1);
  compute_and_finish(cache, "a", tokens(100), {64});
  compute_and_finish(cache, "b", tokens(100, 1000), {64});  // evicts a's snapshot, the only slot
  CHECK(cache.stats().num_evicted_snapshots == 1);
  const PrefixHit hit = find(cache, tokens(100));
  CHECK(hit.num_tokens == 0);
  CHECK(hit.num_attention_tokens == 96);
  CHECK(hit.snapshot_slot == -1);
  cache.add_request("c", tokens(100));
  const auto blocks = cache.admit("c", hit, 100);
  REQUIRE(blocks);
  CHECK(blocks->size() == 7);
  CHECK(cache.num_cached_blocks() == 12);  // none of c's is shared: it writes all of them
  CHECK(find(cache, tokens(100, 1000)).num_tokens == 64);
}

TEST_CASE("a snapshot goes with the K/V block that ends where it does") {
  CacheManager cache = make_cache(4, 17);
  compute_and_finish(cache, "a", tokens(200), {64, 128, 192});
  CHECK(cache.num_cached_snapshots() == 3);
  cache.add_request("b", tokens(80, 1000));
  REQUIRE(cache.admit("b", {}, 80));  // 4 free blocks and the last one of a
  CHECK(cache.num_cached_snapshots() == 2);
  CHECK(cache.num_free_snapshot_slots() == 4);
  CHECK(cache.stats().num_evicted_snapshots == 1);
  CHECK(find(cache, tokens(200)).num_tokens == 128);
  CHECK(cache.reserve_snapshot("b", 64));  // takes the slot that came free
  CHECK(cache.num_cached_snapshots() == 2);
}

TEST_CASE("snapshots are evicted least recently used first, and a hit counts as a use") {
  CacheManager cache = make_cache(2);
  compute_and_finish(cache, "a", tokens(100), {64});
  compute_and_finish(cache, "b", tokens(100, 1000), {64});
  CHECK(compute(cache, "a2", tokens(100), {}).num_tokens == 64);
  compute_and_finish(cache, "c", tokens(100, 2000), {64});
  CHECK(find(cache, tokens(100)).num_tokens == 64);
  CHECK(find(cache, tokens(100, 1000)).num_tokens == 0);
  CHECK(find(cache, tokens(100, 2000)).num_tokens == 64);
}

TEST_CASE("a slot that a hit of this step reads may be reserved in this step; the hit keeps its meaning") {
  CacheManager cache = make_cache(1);
  compute_and_finish(cache, "a", tokens(100), {64});
  cache.add_request("b", tokens(300));
  const PrefixHit hit = cache.find_prefix("b");
  REQUIRE(hit.snapshot_slot == 10);
  REQUIRE(cache.admit("b", hit, 300));
  CHECK(cache.reserve_snapshot("b", 256) == 10);  // read before the forward, written after it
  CHECK(find(cache, tokens(300)).num_tokens == 0);
  cache.publish("b", 300);
  cache.publish_snapshot("b", 256);
  CHECK(find(cache, tokens(300)).num_tokens == 256);
}

TEST_CASE("a hit that something else has taken away meanwhile is refused") {
  CacheManager cache = make_cache(1, 16);
  compute_and_finish(cache, "a", tokens(100), {64});
  cache.add_request("b", tokens(100));
  const PrefixHit hit = cache.find_prefix("b");
  compute(cache, "c", tokens(100, 1000), {64});
  CHECK_THROWS_WITH_AS(cache.admit("b", hit, 100),
                       "the hit of request 'b' names snapshot slot 10, which does not hold its state after 64 tokens: "
                       "call find_prefix again",
                       InvalidArgument);
  CHECK(cache.admit("b", cache.find_prefix("b"), 100));
}

TEST_CASE("D76: cached snapshots give way to a request that needs a slot; reserved ones do not") {
  CacheManager cache = make_cache(2);
  compute_and_finish(cache, "old 1", tokens(100), {64});
  compute_and_finish(cache, "old 2", tokens(100, 1000), {64});
  CHECK(cache.num_free_snapshot_slots() == 2);
  for (const char* id : {"a", "b", "c"}) {
    cache.add_request(id, tokens(100, id[0] * 1000));
    REQUIRE(cache.admit(id, {}, 100));
  }
  const auto a = cache.reserve_snapshot("a", 64), b = cache.reserve_snapshot("b", 64);
  REQUIRE(a);
  REQUIRE(b);
  CHECK(*a != *b);
  CHECK(cache.num_free_snapshot_slots() == 0);
  CHECK_FALSE(cache.reserve_snapshot("c", 64));
  cache.publish("a", 100);
  cache.publish_snapshot("a", 64);
  CHECK(cache.reserve_snapshot("c", 64) == a);  // the very next time
}

TEST_CASE("D80: no slot for a snapshot leaves the request and the pools as they are") {
  CacheManager cache = make_cache(1);
  compute(cache, "a", tokens(100), {});
  REQUIRE(cache.reserve_snapshot("a", 64));
  cache.add_request("b", tokens(100, 1000));
  REQUIRE(cache.admit("b", {}, 100));
  const auto free_blocks = cache.num_free_blocks();
  CHECK_FALSE(cache.reserve_snapshot("b", 64));
  CHECK(cache.num_free_blocks() == free_blocks);
  CHECK(cache.num_free_snapshot_slots() == 0);
  cache.cancel_snapshot("b", 64);  // ignored
  cache.publish_snapshot("a", 64);
  CHECK(cache.num_cached_snapshots() == 1);
}

TEST_CASE("a preempted or removed request gives its reserved slots back") {
  CacheManager cache = make_cache(2);
  compute(cache, "a", tokens(200), {});
  const auto slot = cache.reserve_snapshot("a", 64);
  REQUIRE(slot);
  CHECK(cache.reserve_snapshot("a", 64) == slot);  // asked again
  REQUIRE(cache.reserve_snapshot("a", 128));
  CHECK(cache.num_free_snapshot_slots() == 0);
  cache.cancel_snapshot("a", 128);
  CHECK(cache.num_free_snapshot_slots() == 1);
  cache.release("a");
  CHECK(cache.num_free_snapshot_slots() == 2);
  CHECK_THROWS_WITH_AS(cache.publish_snapshot("a", 64), "request 'a' has reserved no snapshot after 64 tokens",
                       InvalidArgument);
  CHECK(find(cache, tokens(200)).num_tokens == 0);
  REQUIRE(cache.admit("a", cache.find_prefix("a"), 200));
  REQUIRE(cache.reserve_snapshot("a", 64));
  cache.remove_request("a");
  CHECK(cache.num_free_snapshot_slots() == 2);
}

TEST_CASE("a boundary among tokens that are not known yet can be reserved, and published when they are") {
  CacheManager cache = make_cache();
  cache.add_request("a", tokens(126));
  REQUIRE(cache.admit("a", {}, 130));  // one token and three drafts that may reach 128
  REQUIRE(cache.reserve_snapshot("a", 128));
  cache.publish("a", 130);
  CHECK_THROWS_WITH_AS(cache.publish_snapshot("a", 128),
                       "request 'a' has published K/V of 112 tokens, cannot publish a snapshot after 128",
                       InvalidArgument);
  cache.append_tokens("a", tokens(3, 126));
  cache.publish("a", 128);
  cache.publish_snapshot("a", 128);
  CHECK(find(cache, tokens(140)).num_tokens == 128);
}

TEST_CASE("who publishes a snapshot that someone else has published gives the slot back") {
  CacheManager cache = make_cache();
  for (const char* id : {"a", "b"}) {
    cache.add_request(id, tokens(127));
    REQUIRE(cache.admit(id, {}, 128));
    REQUIRE(cache.reserve_snapshot(id, 128));  // both will sample the same token
  }
  for (const char* id : {"a", "b"}) {
    cache.append_tokens(id, tokens(2, 127));
    cache.publish(id, 128);
    cache.publish_snapshot(id, 128);
  }
  CHECK(cache.num_cached_snapshots() == 1);
  CHECK(cache.num_free_snapshot_slots() == 4);
  CHECK(cache.stats().num_snapshots == 1);
}

TEST_CASE("a live request keeps the snapshot of its prompt and one of its output") {
  CacheManager cache = make_cache(8);
  compute(cache, "a", tokens(130), {128});
  cache.append_tokens("a", tokens(1, 130));
  decode(cache, "a", 130, 520);
  CHECK(cache.num_cached_snapshots() == 2);
  CHECK(cache.stats().num_superseded_snapshots == 5);  // at 192, 256, ... 448
  CHECK(cache.stats().num_evicted_snapshots == 0);
  CHECK(find(cache, tokens(140)).num_tokens == 128);
  CHECK(find(cache, tokens(500)).num_tokens == 128);
  cache.remove_request("a");
  // The next turn computes what is new and at most a mamba block.
  CHECK(find(cache, tokens(600)).num_tokens == 512);
}

TEST_CASE("an output snapshot that somebody has hit is kept") {
  CacheManager cache = make_cache(8);
  compute(cache, "a", tokens(100), {64});
  cache.append_tokens("a", tokens(1, 100));
  decode(cache, "a", 100, 130);
  CHECK(compute(cache, "b", tokens(140), {}).num_tokens == 128);
  decode(cache, "a", 130, 330);
  CHECK(cache.num_cached_snapshots() == 3);  // 64, 128, 320
  CHECK(find(cache, tokens(140)).num_tokens == 128);
}

TEST_CASE("with every slot taken, a request gives up its own output snapshot before anyone else's") {
  CacheManager cache = make_cache(2);
  compute_and_finish(cache, "old", tokens(100, 5000), {64});
  compute(cache, "a", tokens(60), {});
  cache.append_tokens("a", tokens(1, 60));
  decode(cache, "a", 60, 400);
  CHECK(find(cache, tokens(100, 5000)).num_tokens == 64);
  CHECK(find(cache, tokens(400)).num_tokens == 384);
  CHECK(cache.stats().num_evicted_snapshots == 0);
}

TEST_CASE("D33: a shared system prompt is hit whether or not questions reach the next boundary") {
  for (const int question : {50, 150}) {
    CAPTURE(question);
    CacheManager cache = make_cache(8);
    const int system = 3 * kBlock;
    int reused = 0;
    for (int i = 0; i < 20; ++i) {
      auto prompt = tokens(system);
      const auto rest = tokens(question, 10'000 * (i + 1));
      prompt.insert(prompt.end(), rest.begin(), rest.end());
      const std::string id = "question " + std::to_string(i);
      const int num_tokens = system + question;
      // As the scheduler does it: at the prompt's last boundary, and where two prompts part.
      cache.add_request(id, prompt);
      const PrefixHit hit = cache.find_prefix(id);
      REQUIRE(cache.admit(id, hit, num_tokens));
      std::vector<int> boundaries{(num_tokens - 1) / kBlock * kBlock};
      const int junction = hit.num_attention_tokens / kBlock * kBlock;
      if (junction > hit.num_tokens && junction != boundaries[0]) boundaries.push_back(junction);
      std::erase_if(boundaries, [&](int boundary) { return !cache.reserve_snapshot(id, boundary); });
      cache.publish(id, num_tokens);
      for (const int boundary : boundaries) cache.publish_snapshot(id, boundary);
      cache.remove_request(id);
      if (i >= 2) CHECK(hit.num_tokens == system);
      reused += hit.num_tokens == system;
    }
    CHECK(reused >= 18);
  }
}

TEST_CASE("D34: prompts that part in the middle of a mamba block share no block that either writes") {
  CacheManager cache = make_cache();
  cache.add_request("a", tokens(90));
  const auto a = *cache.admit("a", {}, 90);
  REQUIRE(cache.reserve_snapshot("a", 64));
  cache.publish("a", 90);
  cache.publish_snapshot("a", 64);
  cache.append_tokens("a", tokens(1, 90));
  auto prompt = tokens(80);
  prompt.resize(120, 7);
  cache.add_request("b", prompt);
  const PrefixHit hit = cache.find_prefix("b");
  CHECK(hit.num_tokens == 64);
  CHECK(hit.num_attention_tokens == 80);
  const auto b = *cache.admit("b", hit, 120);
  for (std::size_t i = 0; i < b.size(); ++i) {
    CAPTURE(i);
    CHECK((std::ranges::find(a, b[i]) != a.end()) == (i < 4));
  }
  decode(cache, "a", 90, 130);
  CHECK(find(cache, tokens(140)).num_tokens == 128);
}

TEST_CASE("D30: forgetting the prefix cache frees the snapshots") {
  CacheManager cache = make_cache();
  compute(cache, "a", tokens(200), {128});
  CHECK_FALSE(cache.reset_prefix_cache());
  CHECK(find(cache, tokens(200)).num_tokens == 128);
  REQUIRE(cache.reserve_snapshot("a", 64));
  cache.release("a");
  CHECK(cache.reset_prefix_cache());
  CHECK(cache.num_cached_snapshots() == 0);
  CHECK(cache.num_free_snapshot_slots() == 4);
  CHECK(cache.find_prefix("a").num_attention_tokens == 0);
}

TEST_CASE("no slots, or no prefix caching: no snapshots, and no hit") {
  CacheManager none = make_cache(0);
  compute(none, "a", tokens(100), {});
  CHECK_FALSE(none.reserve_snapshot("a", 64));
  none.remove_request("a");
  CHECK(find(none, tokens(100)).num_tokens == 0);
  CHECK(find(none, tokens(100)).num_attention_tokens == 96);
  CacheManager off({.num_blocks = 64, .mamba_block_size = 64, .num_snapshot_slots = 4, .enable_prefix_caching = false});
  compute(off, "a", tokens(100), {});
  CHECK_FALSE(off.reserve_snapshot("a", 64));
  CHECK(off.num_free_snapshot_slots() == 0);
}

TEST_CASE("snapshots at other token counts are refused with the numbers") {
  CacheManager cache = make_cache();
  compute(cache, "a", tokens(100), {});
  CHECK_THROWS_WITH_AS(cache.reserve_snapshot("a", 80),
                       "num_tokens is 80, want a positive multiple of mamba_block_size 64", InvalidArgument);
  CHECK_THROWS_AS(cache.reserve_snapshot("a", 0), InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.reserve_snapshot("a", 128),
                       "request 'a' holds 7 blocks of 16 tokens, a snapshot after 128 needs 8", InvalidArgument);
  CHECK_THROWS_WITH_AS(cache.reserve_snapshot("x", 64), "unknown request 'x'", InvalidArgument);
}

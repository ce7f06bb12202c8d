#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "cpp/src/cache/block_pool.h"

using namespace deltaic::cache;

namespace {

std::vector<int> allocate(BlockPool& pool, int count) {
  std::vector<int> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(pool.allocate().block);
  return blocks;
}

}  // namespace

TEST_CASE("block 0 is never handed out, so the capacity is num_blocks - 1") {
  BlockPool pool(64);
  CHECK(pool.capacity() == 63);
  const std::vector<int> all = allocate(pool, 63);
  CHECK(pool.num_free() == 0);
  CHECK(std::ranges::find(all, 0) == all.end());
}

TEST_CASE("D78: blocks that are not cached are reused last freed first") {
  BlockPool pool(16);
  const std::vector<int> abc = allocate(pool, 3);
  pool.release(abc);
  CHECK(allocate(pool, 3) == abc);  // freed c, b, a: a is the last one freed
  pool.release(abc);
  const std::vector<int> last{abc[1]};
  CHECK(pool.allocate().block == abc[0]);
  CHECK(pool.allocate().block == abc[1]);
  pool.release(last);
  CHECK(pool.allocate().block == abc[1]);
}

TEST_CASE("D78: cached blocks are evicted least recently used first, the tail of a sequence before its head") {
  BlockPool pool(7);
  const std::vector<int> first = allocate(pool, 3), second = allocate(pool, 3);
  for (const int block : first) pool.set_cached(block);
  for (const int block : second) pool.set_cached(block);
  pool.release(second);
  pool.release(first);
  pool.touch(second[0]);  // a hit makes it the most recently used one
  pool.release(std::vector{second[0]});
  CHECK(allocate(pool, 6) == std::vector{second[2], second[1], first[2], first[1], first[0], second[0]});
}

TEST_CASE("a block of unknown content is used before a cached one") {
  BlockPool pool(3);
  const std::vector<int> blocks = allocate(pool, 2);
  pool.set_cached(blocks[0]);
  pool.release(blocks);
  const auto [block, was_cached] = pool.allocate();
  CHECK(block == blocks[1]);
  CHECK_FALSE(was_cached);
  CHECK(pool.allocate().was_cached);
}

TEST_CASE("an uncached free block moves to the front") {
  BlockPool pool(4);
  const std::vector<int> blocks = allocate(pool, 3);
  for (const int block : blocks) pool.set_cached(block);
  pool.release(blocks);
  pool.set_uncached(blocks[0]);
  CHECK(pool.num_cached() == 2);
  CHECK(pool.allocate().block == blocks[0]);
}

TEST_CASE("no block is lost or shared: BlockPool against a slow model") {
  constexpr int kNumBlocks = 24;
  std::mt19937 random(7);
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  BlockPool pool(kNumBlocks);
  std::deque<int> free;  // the order in which blocks come
  std::map<int, int> refs, cached;
  for (int block = 1; block < kNumBlocks; ++block) free.push_back(block);

  for (int step = 0; step < 50'000; ++step) {
    std::vector<int> held, hittable;
    for (const auto& [block, count] : refs)
      if (count > 0) held.push_back(block);
    for (int block = 1; block < kNumBlocks; ++block)
      if (refs[block] > 0 || cached[block]) hittable.push_back(block);
    switch (draw(5)) {
      case 0:
        if (free.empty()) break;
        {
          const auto [block, was_cached] = pool.allocate();
          REQUIRE(block == free.front());
          REQUIRE(was_cached == (cached[block] != 0));
          free.pop_front();
          refs[block] = 1, cached[block] = 0;
        }
        break;
      case 1:
        if (hittable.empty()) break;
        {
          const int block = hittable[static_cast<std::size_t>(draw(static_cast<int>(hittable.size())))];
          pool.touch(block);
          if (refs[block]++ == 0) std::erase(free, block);
        }
        break;
      case 2: {
        std::ranges::shuffle(held, random);
        held.resize(std::min<std::size_t>(held.size(), static_cast<std::size_t>(draw(4))));
        pool.release(held);
        for (auto block = held.rbegin(); block != held.rend(); ++block) {
          if (--refs[*block] > 0) continue;
          if (cached[*block])
            free.push_back(*block);
          else
            free.push_front(*block);
        }
      } break;
      case 3:
        if (held.empty()) break;
        if (const int block = held[static_cast<std::size_t>(draw(static_cast<int>(held.size())))]; !cached[block]) {
          pool.set_cached(block);
          cached[block] = 1;
        }
        break;
      case 4:
        if (hittable.empty() || draw(4) != 0) break;
        if (const int block = hittable[static_cast<std::size_t>(draw(static_cast<int>(hittable.size())))];
            cached[block]) {
          pool.set_uncached(block);
          cached[block] = 0;
          if (refs[block] == 0) std::erase(free, block), free.push_front(block);
        }
        break;
    }
    REQUIRE(pool.num_free() == static_cast<int>(free.size()));
    int num_cached = 0, num_held = 0;
    for (int block = 1; block < kNumBlocks; ++block) {
      REQUIRE(pool.ref_count(block) == refs[block]);
      REQUIRE(pool.is_cached(block) == (cached[block] != 0));
      num_cached += cached[block], num_held += refs[block] > 0;
    }
    REQUIRE(pool.num_cached() == num_cached);
    REQUIRE(num_held + pool.num_free() == pool.capacity());
  }
}

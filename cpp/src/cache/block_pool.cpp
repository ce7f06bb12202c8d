#include "cpp/src/cache/block_pool.h"

#include <cassert>

namespace deltaic::cache {

BlockPool::BlockPool(int num_blocks)
    : num_blocks_(num_blocks), blocks_(static_cast<std::size_t>(num_blocks)), free_(num_blocks) {
  for (int block = 1; block < num_blocks; ++block) free_.push_back(block);
}

BlockPool::Allocated BlockPool::allocate() {
  assert(!free_.empty());
  const int block = free_.front();
  free_.remove(block);
  const bool was_cached = at(block).cached;
  at(block) = {.ref_count = 1, .cached = false};
  num_cached_ -= was_cached;
  return {block, was_cached};
}

void BlockPool::touch(int block) {
  assert(at(block).ref_count > 0 || at(block).cached);
  if (at(block).ref_count++ == 0) free_.remove(block);
}

void BlockPool::release(std::span<const int> blocks) {
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    assert(at(*block).ref_count > 0);
    if (--at(*block).ref_count > 0) continue;
    if (at(*block).cached)
      free_.push_back(*block);
    else
      free_.push_front(*block);
  }
}

void BlockPool::set_cached(int block) {
  assert(at(block).ref_count > 0 && !at(block).cached);
  at(block).cached = true;
  ++num_cached_;
}

void BlockPool::set_uncached(int block) {
  assert(at(block).cached);
  at(block).cached = false;
  --num_cached_;
  if (!is_free(block)) return;
  free_.remove(block);
  free_.push_front(block);
}

void BlockPool::reset() {
  assert(num_free() == capacity());
  for (Block& block : blocks_) block.cached = false;
  num_cached_ = 0;
}

}  // namespace deltaic::cache

#pragma once

#include <span>
#include <vector>

#include "cpp/src/cache/id_list.h"

namespace deltaic::cache {

// Reference counts and the free list of blocks 1 ... num_blocks - 1; block 0 is never handed out.
//
// The free list has blocks of unknown content in front, last freed first, then cached ones, least recently used first.
// It knows nothing of hashes: who caches a block says so, and whoever allocates one is told that it was cached.
class BlockPool {
 public:
  explicit BlockPool(int num_blocks);

  int capacity() const { return num_blocks_ - 1; }
  int num_free() const { return free_.size(); }
  int num_cached() const { return num_cached_; }
  int ref_count(int block) const { return at(block).ref_count; }
  bool is_cached(int block) const { return at(block).cached; }
  bool is_free(int block) const { return at(block).ref_count == 0; }

  struct Allocated {
    int block;
    bool was_cached;  // its content was hittable up to now
  };
  // The front of the free list, with one reference and not cached. num_free() must not be 0.
  Allocated allocate();
  // One more owner, for a block that is held or cached.
  void touch(int block);
  // One owner less for each, last block first.
  void release(std::span<const int> blocks);
  // Marks a block that is held.
  void set_cached(int block);
  // The opposite; a free one moves to the front of the free list.
  void set_uncached(int block);
  // Forgets that blocks are cached; all must be free.
  void reset();

 private:
  struct Block {
    int ref_count = 0;
    bool cached = false;
  };
  Block& at(int block) { return blocks_[static_cast<std::size_t>(block)]; }
  const Block& at(int block) const { return blocks_[static_cast<std::size_t>(block)]; }

  int num_blocks_;
  int num_cached_ = 0;
  std::vector<Block> blocks_;
  IdList free_;
};

}  // namespace deltaic::cache

#pragma once

#include <unordered_map>
#include <vector>

#include "cpp/src/cache/block_hash.h"

namespace deltaic::cache {

// Which block and which snapshot belong to a prefix. Requests that compute the same prefix at the same time publish
// several blocks under one hash; a prefix is known while it has a block.
class PrefixIndex {
 public:
  struct Entry {
    int first_block;    // the oldest of the blocks with this content
    int snapshot = -1;  // the slot with the state after this prefix
  };

  explicit PrefixIndex(int num_blocks);

  const Entry* find(const BlockHash& hash) const;
  // Other blocks have the content of this one, which was added.
  bool is_duplicate(int block) const { return at(block).prev >= 0 || at(block).next >= 0; }

  void add_block(const BlockHash& hash, int block);
  // Returns the snapshot that its last block takes with it, or -1.
  int remove_block(int block);
  // -1: none any more. The prefix must be known.
  void set_snapshot(const BlockHash& hash, int snapshot);
  void clear();

 private:
  struct Node {
    BlockHash hash;
    int prev = -1, next = -1;
  };
  Node& at(int block) { return nodes_[static_cast<std::size_t>(block)]; }
  const Node& at(int block) const { return nodes_[static_cast<std::size_t>(block)]; }

  struct Chain {
    Entry entry;
    int last_block;
  };
  std::unordered_map<BlockHash, Chain, BlockHashBucket> entries_;
  std::vector<Node> nodes_;  // [num_blocks]
};

}  // namespace deltaic::cache

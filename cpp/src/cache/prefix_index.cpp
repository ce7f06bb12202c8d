#include "cpp/src/cache/prefix_index.h"

#include <cassert>

namespace deltaic::cache {

PrefixIndex::PrefixIndex(int num_blocks) : nodes_(static_cast<std::size_t>(num_blocks)) {
  entries_.reserve(nodes_.size());  // publishing never stops to rehash
}

const PrefixIndex::Entry* PrefixIndex::find(const BlockHash& hash) const {
  const auto found = entries_.find(hash);
  return found == entries_.end() ? nullptr : &found->second.entry;
}

void PrefixIndex::add_block(const BlockHash& hash, int block) {
  const auto [found, is_new] = entries_.try_emplace(hash, Chain{.entry = {.first_block = block}, .last_block = block});
  at(block) = {.hash = hash};
  if (is_new) return;
  Chain& chain = found->second;
  at(block).prev = chain.last_block;
  at(chain.last_block).next = block;
  chain.last_block = block;
}

int PrefixIndex::remove_block(int block) {
  const Node node = at(block);
  const auto found = entries_.find(node.hash);
  assert(found != entries_.end());
  Chain& chain = found->second;
  if (chain.entry.first_block == chain.last_block) {
    assert(chain.last_block == block);
    const int snapshot = chain.entry.snapshot;
    entries_.erase(found);
    return snapshot;
  }
  if (node.prev >= 0)
    at(node.prev).next = node.next;
  else
    chain.entry.first_block = node.next;
  if (node.next >= 0)
    at(node.next).prev = node.prev;
  else
    chain.last_block = node.prev;
  return -1;
}

void PrefixIndex::set_snapshot(const BlockHash& hash, int snapshot) {
  const auto found = entries_.find(hash);
  assert(found != entries_.end());
  found->second.entry.snapshot = snapshot;
}

void PrefixIndex::clear() { entries_.clear(); }

}  // namespace deltaic::cache

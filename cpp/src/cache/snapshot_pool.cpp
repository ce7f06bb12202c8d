#include "cpp/src/cache/snapshot_pool.h"

#include <cassert>

namespace deltaic::cache {

SnapshotPool::SnapshotPool(int num_slots)
    : slots_(static_cast<std::size_t>(num_slots)), free_(num_slots), reserved_(num_slots), published_(num_slots) {
  for (int slot = 0; slot < num_slots; ++slot) free_.push_back(slot);
}

bool SnapshotPool::is_pending(const BlockHash& hash) const {
  if (reserved_.empty()) return false;
  for (int slot = reserved_.front(); slot >= 0; slot = reserved_.next(slot))
    if (at(slot).is_hash_known && at(slot).hash == hash) return true;
  return false;
}

std::optional<SnapshotPool::Reserved> SnapshotPool::reserve(const std::optional<BlockHash>& hash, int give_up) {
  Reserved result{.slot = -1, .evicted = {}};
  if (!free_.empty()) {
    result.slot = free_.front();
    free_.remove(result.slot);
  } else if (!published_.empty()) {
    result.slot = give_up >= 0 ? give_up : published_.front();
    result.evicted = at(result.slot).hash;
    published_.remove(result.slot);
  } else {
    return std::nullopt;
  }
  at(result.slot) = {.hash = hash.value_or(BlockHash{}), .is_hash_known = hash.has_value()};
  reserved_.push_back(result.slot);
  return result;
}

void SnapshotPool::publish(int slot, const BlockHash& hash) {
  reserved_.remove(slot);
  at(slot) = {.hash = hash, .is_hash_known = true, .was_hit = false, .serial = ++num_serials_};
  published_.push_back(slot);
}

void SnapshotPool::touch(int slot) {
  published_.remove(slot);
  published_.push_back(slot);
  at(slot).was_hit = true;
}

void SnapshotPool::release(int slot) {
  (reserved_.contains(slot) ? reserved_ : published_).remove(slot);
  at(slot) = {};
  free_.push_front(slot);
}

void SnapshotPool::reset() {
  while (!published_.empty()) release(published_.front());
}

}  // namespace deltaic::cache

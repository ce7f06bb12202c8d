#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpp/src/cache/block_hash.h"
#include "cpp/src/cache/id_list.h"

namespace deltaic::cache {

// Slots 0 ... num_slots - 1 for recurrent states. A slot is free, reserved (someone will write it), or published
// (hittable, and evictable least recently used first).
class SnapshotPool {
 public:
  explicit SnapshotPool(int num_slots);

  int num_slots() const { return static_cast<int>(slots_.size()); }
  int num_published() const { return published_.size(); }
  int num_reserved() const { return reserved_.size(); }
  // Someone has reserved a slot for this prefix.
  bool is_pending(const BlockHash& hash) const;

  struct Reserved {
    int slot;
    std::optional<BlockHash> evicted;  // the prefix whose snapshot it held up to now
  };
  // `hash`: what it will hold, where that is known. A free slot; else `give_up`, unless that is -1; else the least
  // recently used one; nullopt when all are reserved.
  std::optional<Reserved> reserve(const std::optional<BlockHash>& hash, int give_up);
  void publish(int slot, const BlockHash& hash);
  // Notes a hit: now the most recently used one.
  void touch(int slot);
  // Back to the free slots, from either state.
  void release(int slot);
  // Frees all published slots.
  void reset();

  // Of a published slot.
  const BlockHash& hash(int slot) const { return at(slot).hash; }
  bool was_hit(int slot) const { return at(slot).was_hit; }
  // Tells apart the snapshots that a slot has held; 0 is no snapshot's.
  std::uint64_t serial(int slot) const { return at(slot).serial; }

 private:
  struct Slot {
    BlockHash hash{};
    bool is_hash_known = false;  // of a published slot: always
    bool was_hit = false;
    std::uint64_t serial = 0;
  };
  Slot& at(int slot) { return slots_[static_cast<std::size_t>(slot)]; }
  const Slot& at(int slot) const { return slots_[static_cast<std::size_t>(slot)]; }

  std::vector<Slot> slots_;
  IdList free_, reserved_, published_;
  std::uint64_t num_serials_ = 0;
};

}  // namespace deltaic::cache

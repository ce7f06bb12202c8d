#include <algorithm>
#include <cassert>
#include <limits>
#include <unordered_map>

#include <deltaic/cache.h>

#include "cpp/src/cache/block_hash.h"
#include "cpp/src/cache/block_pool.h"
#include "cpp/src/cache/prefix_index.h"
#include "cpp/src/cache/request_tokens.h"
#include "cpp/src/cache/shadow_tokens.h"
#include "cpp/src/cache/snapshot_pool.h"
#include "cpp/src/check.h"

namespace deltaic {
namespace {

using cache::BlockHash;

struct Reservation {
  int num_tokens;
  int slot;  // of the SnapshotPool
};

struct CachedRequest {
  cache::RequestTokens tokens;
  bool is_admitted = false;
  std::vector<int> blocks{};
  int num_published_blocks = 0;  // leading ones that are in the index: hits, and its own
  std::vector<Reservation> reservations{};
  // The last snapshot of its own output, by slot and serial; serial 0: none.
  int output_snapshot = -1;
  std::uint64_t output_snapshot_serial = 0;
};

void check_options(const CacheManager::Options& options) {
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  DELTAIC_CHECK(options.num_blocks >= 2 && options.num_blocks < kMax, "num_blocks is ", options.num_blocks,
                ", want 2 to ", kMax - 1, " (block 0 is never handed out)");
  DELTAIC_CHECK(options.block_size >= 1, "block_size is ", options.block_size, ", want at least 1");
  DELTAIC_CHECK(options.mamba_block_size >= 0 && options.mamba_block_size % options.block_size == 0,
                "mamba_block_size is ", options.mamba_block_size, ", want a multiple of block_size ",
                options.block_size);
  DELTAIC_CHECK(options.num_snapshot_slots >= 0, "num_snapshot_slots is ", options.num_snapshot_slots,
                ", want at least 0");
  DELTAIC_CHECK(options.first_snapshot_slot >= 0 && options.first_snapshot_slot < kMax - options.num_snapshot_slots,
                "first_snapshot_slot is ", options.first_snapshot_slot, ", want 0 to ",
                kMax - options.num_snapshot_slots - 1);
}

}  // namespace

struct CacheManager::Impl {
  explicit Impl(const Options& o)
      : options(o),
        blocks(static_cast<int>(o.num_blocks)),
        index(static_cast<int>(o.num_blocks)),
        snapshots(o.enable_prefix_caching && o.mamba_block_size > 0 ? o.num_snapshot_slots : 0),
        shadow_blocks(static_cast<int>(o.num_blocks)),
        shadow_snapshots(snapshots.num_slots()) {}

  CachedRequest& request(const std::string& req_id) {
    const auto found = requests.find(req_id);
    DELTAIC_CHECK(found != requests.end(), "unknown request '", req_id, "'");
    return found->second;
  }

  int num_blocks_for(int num_tokens) const {
    DELTAIC_CHECK(num_tokens >= 0, "num_tokens is ", num_tokens, ", want at least 0");
    return static_cast<int>((std::int64_t{num_tokens} + options.block_size - 1) / options.block_size);
  }

  PrefixHit find_prefix(const CachedRequest& req) const;
  // The blocks of a hit; throws InvalidArgument when it is not what find_prefix would return now.
  std::vector<int> hit_blocks(const std::string& req_id, const CachedRequest& req, const PrefixHit& hit) const;
  int allocate_block();
  void publish(CachedRequest& req, int num_computed_tokens);
  void release(CachedRequest& req);
  void drop_snapshot(int slot);
  std::optional<BlockHash> hash_at(const CachedRequest& req, int num_tokens) const {
    if (num_tokens > req.tokens.size()) return std::nullopt;
    return req.tokens.block_hash(num_tokens / options.block_size - 1);
  }
  // The last snapshot of the request's own output, when it is still there and nobody has hit it; else -1.
  int superseded_snapshot(const CachedRequest& req) const {
    const int slot = req.output_snapshot;
    if (slot < 0 || snapshots.serial(slot) != req.output_snapshot_serial || snapshots.was_hit(slot)) return -1;
    return slot;
  }

  Options options;
  cache::BlockHasher hasher;
  cache::BlockPool blocks;
  cache::PrefixIndex index;
  cache::SnapshotPool snapshots;
  cache::ShadowTokens shadow_blocks, shadow_snapshots;
  std::unordered_map<std::string, CachedRequest> requests;
  CacheStats stats;
};

PrefixHit CacheManager::Impl::find_prefix(const CachedRequest& req) const {
  PrefixHit hit;
  if (!options.enable_prefix_caching || req.tokens.size() == 0) return hit;
  const int block_size = options.block_size;
  const int max_blocks = (req.tokens.size() - 1) / block_size;
  for (int i = 0; i < max_blocks; ++i) {
    const cache::PrefixIndex::Entry* entry = index.find(req.tokens.block_hash(i));
    if (entry == nullptr) break;
    assert(shadow_blocks.holds(entry->first_block, (i + 1) * block_size, req.tokens.block(i)));
    hit.num_attention_tokens = (i + 1) * block_size;
    if (options.mamba_block_size == 0) {
      hit.num_tokens = hit.num_attention_tokens;
    } else if (entry->snapshot >= 0) {
      assert(shadow_snapshots.holds(entry->snapshot, (i + 1) * block_size, req.tokens.block(i)));
      hit.num_tokens = hit.num_attention_tokens;
      hit.snapshot_slot = options.first_snapshot_slot + entry->snapshot;
    }
  }
  return hit;
}

std::vector<int> CacheManager::Impl::hit_blocks(const std::string& req_id, const CachedRequest& req,
                                                const PrefixHit& hit) const {
  if (hit.num_tokens == 0) return {};
  DELTAIC_CHECK(options.enable_prefix_caching && hit.num_tokens > 0 && hit.num_tokens % options.block_size == 0 &&
                    hit.num_tokens < req.tokens.size(),
                "request '", req_id, "' has ", req.tokens.size(), " tokens, its hit ", hit.num_tokens,
                ", which find_prefix cannot have returned");
  std::vector<int> result;
  result.reserve(static_cast<std::size_t>(hit.num_tokens / options.block_size));
  int snapshot = -1;
  for (int i = 0; i < hit.num_tokens / options.block_size; ++i) {
    const cache::PrefixIndex::Entry* entry = index.find(req.tokens.block_hash(i));
    DELTAIC_CHECK(entry != nullptr, "the hit of request '", req_id, "' is stale at token ", i * options.block_size,
                  " of ", hit.num_tokens, ": call find_prefix again");
    result.push_back(entry->first_block);
    snapshot = entry->snapshot;
  }
  const bool has_snapshot = snapshot >= 0 && hit.snapshot_slot == options.first_snapshot_slot + snapshot;
  DELTAIC_CHECK(options.mamba_block_size == 0 || has_snapshot, "the hit of request '", req_id, "' names snapshot slot ",
                hit.snapshot_slot, ", which does not hold its state after ", hit.num_tokens,
                " tokens: call find_prefix again");
  return result;
}

int CacheManager::Impl::allocate_block() {
  const auto [block, was_cached] = blocks.allocate();
  if (was_cached) {
    ++stats.num_evicted_blocks;
    if (const int snapshot = index.remove_block(block); snapshot >= 0) {
      ++stats.num_evicted_snapshots;
      shadow_snapshots.clear(snapshot);
      snapshots.release(snapshot);
    }
  }
  shadow_blocks.clear(block);
  return block;
}

void CacheManager::Impl::publish(CachedRequest& req, int num_computed_tokens) {
  const int end = std::min(num_computed_tokens, req.tokens.size()) / options.block_size;
  for (int& i = req.num_published_blocks; i < end; ++i) {
    const BlockHash& hash = req.tokens.block_hash(i);
    const int block = req.blocks[static_cast<std::size_t>(i)];
    // A free block of the same content would only take room: this one will be freed later.
    if (const auto* entry = index.find(hash); entry != nullptr && blocks.is_free(entry->first_block)) {
      const int spare = entry->first_block;
      index.add_block(hash, block);
      index.remove_block(spare);
      blocks.set_uncached(spare);
    } else {
      index.add_block(hash, block);
    }
    blocks.set_cached(block);
    shadow_blocks.set(block, (i + 1) * options.block_size, req.tokens.block(i));
  }
}

void CacheManager::Impl::release(CachedRequest& req) {
  for (const Reservation& reservation : req.reservations) snapshots.release(reservation.slot);
  req.reservations.clear();
  // Of several blocks with one content only the last to be freed stays in the index, so a prefix has either blocks
  // that are all in use or one free block, and that one is freed after every block of its continuations.
  for (const int block : req.blocks) {
    if (blocks.ref_count(block) > 1 || !blocks.is_cached(block) || !index.is_duplicate(block)) continue;
    index.remove_block(block);
    blocks.set_uncached(block);
  }
  blocks.release(req.blocks);
  req.blocks.clear();
  req.num_published_blocks = 0;
  req.is_admitted = false;
}

void CacheManager::Impl::drop_snapshot(int slot) {
  index.set_snapshot(snapshots.hash(slot), -1);
  shadow_snapshots.clear(slot);
  snapshots.release(slot);
}

CacheManager::CacheManager(const Options& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(options);
}
CacheManager::~CacheManager() = default;
CacheManager::CacheManager(CacheManager&&) noexcept = default;
CacheManager& CacheManager::operator=(CacheManager&&) noexcept = default;

void CacheManager::add_request(const std::string& req_id, std::span<const std::int32_t> token_ids,
                               std::string_view cache_salt) {
  DELTAIC_CHECK(!impl_->requests.contains(req_id), "request '", req_id, "' is registered already");
  cache::RequestTokens tokens(impl_->options.enable_prefix_caching ? &impl_->hasher : nullptr,
                              impl_->options.block_size, cache_salt);
  tokens.append(token_ids);
  tokens.set_prompt();
  impl_->requests.emplace(req_id, CachedRequest{.tokens = std::move(tokens)});
}

void CacheManager::append_tokens(const std::string& req_id, std::span<const std::int32_t> token_ids) {
  impl_->request(req_id).tokens.append(token_ids);
}

void CacheManager::remove_request(const std::string& req_id) {
  const auto found = impl_->requests.find(req_id);
  if (found == impl_->requests.end()) return;
  impl_->release(found->second);
  impl_->requests.erase(found);
}

PrefixHit CacheManager::find_prefix(const std::string& req_id) const {
  return impl_->find_prefix(impl_->request(req_id));
}

std::optional<std::vector<int>> CacheManager::admit(const std::string& req_id, const PrefixHit& hit, int num_tokens) {
  Impl& impl = *impl_;
  CachedRequest& req = impl.request(req_id);
  DELTAIC_CHECK(!req.is_admitted, "request '", req_id, "' is admitted already: release it first");
  DELTAIC_CHECK(num_tokens >= hit.num_tokens, "num_tokens is ", num_tokens, ", less than the hit of ", hit.num_tokens);
  std::vector<int> blocks = impl.hit_blocks(req_id, req, hit);
  const int num_blocks = impl.num_blocks_for(num_tokens);
  const int num_hits = static_cast<int>(blocks.size());
  const auto num_free_hits = std::ranges::count_if(blocks, [&](int block) { return impl.blocks.is_free(block); });
  if (num_blocks - num_hits + num_free_hits > impl.blocks.num_free()) return std::nullopt;

  // All hits are held before anything is allocated, so that no allocation evicts one.
  for (const int block : blocks) impl.blocks.touch(block);
  if (hit.snapshot_slot >= 0 && num_hits > 0) {
    const int snapshot = hit.snapshot_slot - impl.options.first_snapshot_slot;
    assert(impl.shadow_snapshots.holds(snapshot, hit.num_tokens, req.tokens.block(num_hits - 1)));
    impl.snapshots.touch(snapshot);
  }
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  while (static_cast<int>(blocks.size()) < num_blocks) blocks.push_back(impl.allocate_block());

  req.is_admitted = true;
  req.num_published_blocks = num_hits;
  req.blocks = blocks;
  ++impl.stats.num_queries;
  impl.stats.num_query_tokens += req.tokens.size();
  impl.stats.num_hit_tokens += hit.num_tokens;
  return blocks;
}

std::optional<std::vector<int>> CacheManager::extend(const std::string& req_id, int num_tokens) {
  CachedRequest& req = impl_->request(req_id);
  DELTAIC_CHECK(req.is_admitted, "request '", req_id, "' is not admitted");
  const int num_new = impl_->num_blocks_for(num_tokens) - static_cast<int>(req.blocks.size());
  if (num_new <= 0) return std::vector<int>{};
  if (num_new > impl_->blocks.num_free()) return std::nullopt;
  std::vector<int> added;
  added.reserve(static_cast<std::size_t>(num_new));
  for (int i = 0; i < num_new; ++i) added.push_back(impl_->allocate_block());
  req.blocks.insert(req.blocks.end(), added.begin(), added.end());
  return added;
}

void CacheManager::publish(const std::string& req_id, int num_computed_tokens) {
  CachedRequest& req = impl_->request(req_id);
  DELTAIC_CHECK(impl_->num_blocks_for(num_computed_tokens) <= static_cast<int>(req.blocks.size()), "request '", req_id,
                "' holds ", req.blocks.size(), " blocks of ", impl_->options.block_size,
                " tokens, cannot have computed ", num_computed_tokens);
  if (impl_->options.enable_prefix_caching) impl_->publish(req, num_computed_tokens);
}

void CacheManager::release(const std::string& req_id) { impl_->release(impl_->request(req_id)); }

std::optional<int> CacheManager::reserve_snapshot(const std::string& req_id, int num_tokens) {
  Impl& impl = *impl_;
  CachedRequest& req = impl.request(req_id);
  const Options& options = impl.options;
  DELTAIC_CHECK(options.mamba_block_size > 0, "snapshots need mamba_block_size: the model has no recurrent layers");
  DELTAIC_CHECK(num_tokens > 0 && num_tokens % options.mamba_block_size == 0, "num_tokens is ", num_tokens,
                ", want a positive multiple of mamba_block_size ", options.mamba_block_size);
  DELTAIC_CHECK(num_tokens / options.block_size <= static_cast<int>(req.blocks.size()), "request '", req_id, "' holds ",
                req.blocks.size(), " blocks of ", options.block_size, " tokens, a snapshot after ", num_tokens,
                " needs ", num_tokens / options.block_size);
  if (impl.snapshots.num_slots() == 0) return std::nullopt;
  for (const Reservation& reservation : req.reservations)
    if (reservation.num_tokens == num_tokens) return options.first_snapshot_slot + reservation.slot;

  const std::optional<BlockHash> hash = impl.hash_at(req, num_tokens);
  if (hash.has_value()) {
    const auto* entry = impl.index.find(*hash);
    if ((entry != nullptr && entry->snapshot >= 0) || impl.snapshots.is_pending(*hash)) return std::nullopt;
  }
  const bool of_output = num_tokens > req.tokens.num_prompt_tokens();
  const int give_up = of_output ? impl.superseded_snapshot(req) : -1;
  const auto reserved = impl.snapshots.reserve(hash, give_up);
  if (!reserved) return std::nullopt;
  if (reserved->evicted) {
    impl.index.set_snapshot(*reserved->evicted, -1);
    impl.shadow_snapshots.clear(reserved->slot);
    ++(reserved->slot == give_up ? impl.stats.num_superseded_snapshots : impl.stats.num_evicted_snapshots);
  }
  req.reservations.push_back({num_tokens, reserved->slot});
  return options.first_snapshot_slot + reserved->slot;
}

void CacheManager::publish_snapshot(const std::string& req_id, int num_tokens) {
  Impl& impl = *impl_;
  CachedRequest& req = impl.request(req_id);
  const auto found = std::ranges::find(req.reservations, num_tokens, &Reservation::num_tokens);
  DELTAIC_CHECK(found != req.reservations.end(), "request '", req_id, "' has reserved no snapshot after ", num_tokens,
                " tokens");
  const int num_published_tokens = req.num_published_blocks * impl.options.block_size;
  DELTAIC_CHECK(num_tokens <= num_published_tokens, "request '", req_id, "' has published K/V of ",
                num_published_tokens, " tokens, cannot publish a snapshot after ", num_tokens);
  const int slot = found->slot;
  req.reservations.erase(found);
  const BlockHash hash = req.tokens.block_hash(num_tokens / impl.options.block_size - 1);
  const auto* entry = impl.index.find(hash);
  assert(entry != nullptr);
  if (entry->snapshot >= 0) {  // someone else was faster
    impl.snapshots.release(slot);
    return;
  }
  if (num_tokens > req.tokens.num_prompt_tokens()) {
    if (const int previous = impl.superseded_snapshot(req); previous >= 0) {
      impl.drop_snapshot(previous);
      ++impl.stats.num_superseded_snapshots;
    }
  }
  impl.snapshots.publish(slot, hash);
  impl.index.set_snapshot(hash, slot);
  [[maybe_unused]] const auto last_tokens = req.tokens.block(num_tokens / impl.options.block_size - 1);
  assert(impl.shadow_blocks.holds(entry->first_block, num_tokens, last_tokens));
  impl.shadow_snapshots.set(slot, num_tokens, last_tokens);
  ++impl.stats.num_snapshots;
  if (num_tokens > req.tokens.num_prompt_tokens()) {
    req.output_snapshot = slot;
    req.output_snapshot_serial = impl.snapshots.serial(slot);
  }
}

void CacheManager::cancel_snapshot(const std::string& req_id, int num_tokens) {
  CachedRequest& req = impl_->request(req_id);
  const auto found = std::ranges::find(req.reservations, num_tokens, &Reservation::num_tokens);
  if (found == req.reservations.end()) return;
  impl_->snapshots.release(found->slot);
  req.reservations.erase(found);
}

bool CacheManager::can_ever_fit(int num_tokens) const {
  return impl_->num_blocks_for(num_tokens) <= impl_->blocks.capacity();
}
std::int64_t CacheManager::num_free_blocks() const { return impl_->blocks.num_free(); }
std::int64_t CacheManager::num_total_blocks() const { return impl_->blocks.capacity(); }
int CacheManager::num_free_snapshot_slots() const {
  return impl_->snapshots.num_slots() - impl_->snapshots.num_reserved();
}
std::int64_t CacheManager::num_cached_blocks() const { return impl_->blocks.num_cached(); }
int CacheManager::num_cached_snapshots() const { return impl_->snapshots.num_published(); }
const CacheManager::Options& CacheManager::options() const { return impl_->options; }
const CacheStats& CacheManager::stats() const { return impl_->stats; }

bool CacheManager::reset_prefix_cache() {
  Impl& impl = *impl_;
  if (impl.blocks.num_free() < impl.blocks.capacity()) return false;
  impl.index.clear();
  impl.blocks.reset();
  impl.snapshots.reset();
  return true;
}

}  // namespace deltaic

#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <deltaic/cache.h>

namespace deltaic::test {

// What CacheManager should do, by rules that scan everything and compare whole token lists. It predicts every answer,
// block ids included.
class SlowCache {
 public:
  using Tokens = std::vector<std::int32_t>;

  // The content of a block or a snapshot: a whole prefix.
  struct Prefix {
    std::string salt;
    Tokens tokens;
    friend bool operator==(const Prefix&, const Prefix&) = default;
  };

  struct Request {
    std::string salt;
    Tokens tokens;
    std::size_t num_prompt_tokens = 0;
    bool is_admitted = false;
    std::vector<int> blocks;
    int num_published = 0;               // of its blocks
    std::map<int, int> reserved;         // num_tokens -> slot
    std::optional<int> output_snapshot;  // its birth
  };

  explicit SlowCache(const CacheManager::Options& o) : options(o) {
    for (int block = 1; block < o.num_blocks; ++block) free.push_back(block);
  }

  int owners(int block) const {
    int count = 0;
    for (const auto& [id, request] : requests) count += static_cast<int>(std::ranges::count(request.blocks, block));
    return count;
  }
  std::optional<int> snapshot_of(const Prefix& prefix) const {
    for (const Snapshot& snapshot : snapshots)
      if (snapshot.prefix == prefix) return snapshot.slot;
    return {};
  }
  std::optional<int> block_of(const Prefix& prefix) const {
    std::optional<int> oldest;
    for (const auto& [block, content] : contents)
      if (content.prefix == prefix && (!oldest || content.birth < contents.at(*oldest).birth)) oldest = block;
    return oldest;
  }
  static Prefix prefix(const Request& request, int num_tokens) {
    return {request.salt, {request.tokens.begin(), request.tokens.begin() + num_tokens}};
  }
  static bool starts_with(const Request& request, const Prefix& prefix, std::size_t max_tokens) {
    return prefix.salt == request.salt && prefix.tokens.size() <= max_tokens &&
           std::equal(prefix.tokens.begin(), prefix.tokens.end(), request.tokens.begin());
  }

  // The longest of all that is published, whether or not its beginning is: the pools must see to that.
  PrefixHit find_prefix(const Request& request) const {
    PrefixHit hit;
    if (request.tokens.empty()) return hit;
    const std::size_t max_tokens = request.tokens.size() - 1;
    for (const auto& [block, content] : contents)
      if (starts_with(request, content.prefix, max_tokens))
        hit.num_attention_tokens = std::max(hit.num_attention_tokens, static_cast<int>(content.prefix.tokens.size()));
    if (options.mamba_block_size == 0) hit.num_tokens = hit.num_attention_tokens;
    for (const Snapshot& snapshot : snapshots)
      if (const int size = static_cast<int>(snapshot.prefix.tokens.size());
          size > hit.num_tokens && starts_with(request, snapshot.prefix, max_tokens))
        hit.num_tokens = size, hit.snapshot_slot = snapshot.slot;
    return hit;
  }

  std::optional<std::vector<int>> admit(Request& request, const PrefixHit& hit, int num_tokens) {
    std::vector<int> blocks;
    for (int end = options.block_size; end <= hit.num_tokens; end += options.block_size)
      blocks.push_back(*block_of(prefix(request, end)));
    const auto num_free_hits = std::ranges::count_if(blocks, [&](int block) { return owners(block) == 0; });
    const int num_new = num_blocks_for(num_tokens) - static_cast<int>(blocks.size());
    if (num_new + num_free_hits > static_cast<int>(free.size())) return {};
    for (const int block : blocks) std::erase(free, block);
    if (hit.snapshot_slot >= 0) {
      const auto used = std::ranges::find(snapshots, hit.snapshot_slot, &Snapshot::slot);
      used->was_hit = true;
      std::rotate(used, used + 1, snapshots.end());
    }
    request.is_admitted = true;
    request.num_published = static_cast<int>(blocks.size());
    request.blocks = blocks;
    for (int i = 0; i < num_new; ++i) request.blocks.push_back(allocate());
    return request.blocks;
  }

  std::optional<std::vector<int>> extend(Request& request, int num_tokens) {
    const int num_new = num_blocks_for(num_tokens) - static_cast<int>(request.blocks.size());
    if (num_new > static_cast<int>(free.size())) return {};
    std::vector<int> added;
    for (int i = 0; i < num_new; ++i) added.push_back(allocate());
    request.blocks.insert(request.blocks.end(), added.begin(), added.end());
    return added;
  }

  void publish(Request& request, int num_computed_tokens) {
    const int known = std::min(num_computed_tokens, static_cast<int>(request.tokens.size()));
    for (; (request.num_published + 1) * options.block_size <= known; ++request.num_published) {
      const Prefix content = prefix(request, (request.num_published + 1) * options.block_size);
      if (const auto same = block_of(content); same && owners(*same) == 0) {
        contents.erase(*same);
        std::erase(free, *same);
        free.push_front(*same);
      }
      contents[request.blocks[static_cast<std::size_t>(request.num_published)]] = {content, ++clock};
    }
  }

  void release(Request& request) {
    request.reserved.clear();
    for (const int block : request.blocks) {
      if (owners(block) > 1 || !contents.contains(block)) continue;
      const Prefix content = contents[block].prefix;
      const auto same = std::ranges::count_if(contents, [&](const auto& c) { return c.second.prefix == content; });
      if (same > 1) contents.erase(block);
    }
    while (!request.blocks.empty()) {
      const int block = request.blocks.back();
      request.blocks.pop_back();
      if (owners(block) > 0) continue;
      if (contents.contains(block))
        free.push_back(block);
      else
        free.push_front(block);
    }
    request.num_published = 0;
    request.is_admitted = false;
  }

  // The slots that may be handed out now; none: no reservation is possible. Ends with `evicted` forgotten.
  std::set<int> slots_for(Request& request, int num_tokens) {
    if (request.reserved.contains(num_tokens)) return {request.reserved[num_tokens]};
    if (num_tokens <= static_cast<int>(request.tokens.size())) {
      const Prefix content = prefix(request, num_tokens);
      if (snapshot_of(content)) return {};
      for (const auto& [id, other] : requests)
        for (const auto& [count, slot] : other.reserved)
          if (pending.contains(slot) && pending[slot] == content) return {};
    }
    std::set<int> slots;
    for (int i = 0; i < options.num_snapshot_slots; ++i) slots.insert(options.first_snapshot_slot + i);
    for (const Snapshot& snapshot : snapshots) slots.erase(snapshot.slot);
    for (const auto& [id, other] : requests)
      for (const auto& [count, slot] : other.reserved) slots.erase(slot);
    if (!slots.empty()) return slots;
    if (const auto own = superseded(request, num_tokens); own != snapshots.end()) return {own->slot};
    if (!snapshots.empty()) return {snapshots.front().slot};
    return {};
  }
  void reserve(Request& request, int num_tokens, int slot) {
    std::erase_if(snapshots, [&](const Snapshot& snapshot) { return snapshot.slot == slot; });
    if (!request.reserved.contains(num_tokens)) {
      pending.erase(slot);  // as known at this time
      if (num_tokens <= static_cast<int>(request.tokens.size())) pending[slot] = prefix(request, num_tokens);
    }
    request.reserved[num_tokens] = slot;
  }
  void publish_snapshot(Request& request, int num_tokens) {
    const int slot = request.reserved[num_tokens];
    request.reserved.erase(num_tokens);
    const Prefix content = prefix(request, num_tokens);
    if (snapshot_of(content)) return;
    const auto own = superseded(request, num_tokens);
    if (own != snapshots.end()) snapshots.erase(own);
    snapshots.push_back({content, slot, false, ++clock});
    if (num_tokens > static_cast<int>(request.num_prompt_tokens)) request.output_snapshot = clock;
  }
  void reset() { contents.clear(), snapshots.clear(); }

  int num_blocks_for(int num_tokens) const { return (num_tokens + options.block_size - 1) / options.block_size; }

  struct Content {
    Prefix prefix;
    int birth = 0;
  };
  struct Snapshot {
    Prefix prefix;
    int slot;
    bool was_hit;
    int birth;
  };
  CacheManager::Options options;
  std::map<std::string, Request> requests;
  std::deque<int> free;             // in the order of use
  std::map<int, Content> contents;  // of published blocks
  std::vector<Snapshot> snapshots;  // published, least recently used first
  std::map<int, Prefix> pending;    // what a reserved slot will hold
  int clock = 0;

 private:
  std::vector<Snapshot>::iterator superseded(const Request& request, int num_tokens) {
    if (num_tokens <= static_cast<int>(request.num_prompt_tokens) || !request.output_snapshot) return snapshots.end();
    return std::ranges::find_if(snapshots, [&](const Snapshot& snapshot) {
      return snapshot.birth == *request.output_snapshot && !snapshot.was_hit;
    });
  }
  int allocate() {
    const int block = free.front();
    free.pop_front();
    if (const auto found = contents.find(block); found != contents.end()) {
      const Prefix content = found->second.prefix;
      contents.erase(found);
      if (!block_of(content))
        std::erase_if(snapshots, [&](const Snapshot& snapshot) { return snapshot.prefix == content; });
    }
    return block;
  }
};

}  // namespace deltaic::test

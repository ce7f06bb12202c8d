#pragma once

#ifndef NDEBUG
#include <algorithm>
#include <cstdint>
#include <vector>
#endif
#include <cstdint>
#include <span>

namespace deltaic::cache {

// What blocks or state slots really contain, for assertions in debug builds; empty in a release build. An item holds
// the first num_tokens tokens of some sequence (a block: the last of those); last_tokens are the latest ones, and may
// be left out where only the count matters.
#ifndef NDEBUG
class ShadowTokens {
 public:
  explicit ShadowTokens(int num_items) : items_(static_cast<std::size_t>(num_items)) {}
  void set(int item, int num_tokens, std::span<const std::int32_t> last_tokens = {}) {
    at(item) = {num_tokens, {last_tokens.begin(), last_tokens.end()}};
  }
  void clear(int item) { at(item) = {}; }
  bool holds(int item, int num_tokens, std::span<const std::int32_t> last_tokens = {}) const {
    return at(item).num_tokens == num_tokens && std::ranges::equal(at(item).last_tokens, last_tokens);
  }

 private:
  struct Item {
    int num_tokens = -1;  // -1: unknown
    std::vector<std::int32_t> last_tokens;
  };
  Item& at(int item) { return items_.at(static_cast<std::size_t>(item)); }
  const Item& at(int item) const { return items_.at(static_cast<std::size_t>(item)); }
  std::vector<Item> items_;
};
#else
class ShadowTokens {
 public:
  explicit ShadowTokens(int) {}
  void set(int, int, std::span<const std::int32_t> = {}) {}
  void clear(int) {}
  bool holds(int, int, std::span<const std::int32_t> = {}) const { return true; }
};
#endif

}  // namespace deltaic::cache

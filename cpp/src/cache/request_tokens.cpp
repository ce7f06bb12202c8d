#include "cpp/src/cache/request_tokens.h"

#include <algorithm>
#include <limits>

#include "cpp/src/check.h"

namespace deltaic::cache {

RequestTokens::RequestTokens(const BlockHasher* hasher, int block_size, std::string_view salt)
    : hasher_(hasher), block_size_(block_size) {
  if (hasher_ != nullptr) last_hash_ = hasher_->root(salt);
}

void RequestTokens::append(std::span<const std::int32_t> token_ids) {
  DELTAIC_CHECK(token_ids.size() <= static_cast<std::size_t>(std::numeric_limits<int>::max() - size_), "a request of ",
                size_, " + ", token_ids.size(), " tokens is too long");
  size_ += static_cast<int>(token_ids.size());
  if (hasher_ == nullptr) return;
#ifndef NDEBUG
  all_.insert(all_.end(), token_ids.begin(), token_ids.end());
#endif
  const auto block_size = static_cast<std::size_t>(block_size_);
  const auto close_block = [&](std::span<const std::int32_t> block) {
    last_hash_ = hasher_->next(last_hash_, block);
    hashes_.push_back(last_hash_);
  };
  if (!tail_.empty()) {
    const std::size_t count = std::min(block_size - tail_.size(), token_ids.size());
    tail_.insert(tail_.end(), token_ids.begin(), token_ids.begin() + static_cast<std::ptrdiff_t>(count));
    token_ids = token_ids.subspan(count);
    if (tail_.size() < block_size) return;
    close_block(tail_);
    tail_.clear();
  }
  for (; token_ids.size() >= block_size; token_ids = token_ids.subspan(block_size))
    close_block(token_ids.first(block_size));
  tail_.assign(token_ids.begin(), token_ids.end());
}

std::span<const std::int32_t> RequestTokens::block([[maybe_unused]] int i) const {
#ifndef NDEBUG
  const auto block_size = static_cast<std::size_t>(block_size_);
  return std::span(all_).subspan(static_cast<std::size_t>(i) * block_size, block_size);
#else
  return {};
#endif
}

}  // namespace deltaic::cache

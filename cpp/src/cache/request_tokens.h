#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cpp/src/cache/block_hash.h"

namespace deltaic::cache {

// The known tokens of a request as the cache sees them: a hash for each full block. Of the tokens themselves it keeps
// those of the block that is not full yet; a debug build keeps them all.
class RequestTokens {
 public:
  // hasher: nullptr when prefixes are not cached; then tokens are only counted.
  RequestTokens(const BlockHasher* hasher, int block_size, std::string_view salt);

  void append(std::span<const std::int32_t> token_ids);
  // What came before is the prompt.
  void set_prompt() { num_prompt_tokens_ = size_; }

  int size() const { return size_; }
  int num_prompt_tokens() const { return num_prompt_tokens_; }
  const BlockHash& block_hash(int i) const { return hashes_[static_cast<std::size_t>(i)]; }
  // The tokens of full block i in a debug build, nothing in a release build.
  std::span<const std::int32_t> block(int i) const;

 private:
  const BlockHasher* hasher_;
  int block_size_;
  int size_ = 0;
  int num_prompt_tokens_ = 0;
  BlockHash last_hash_;
  std::vector<BlockHash> hashes_;
  std::vector<std::int32_t> tail_;  // fewer than block_size
#ifndef NDEBUG
  std::vector<std::int32_t> all_;
#endif
};

}  // namespace deltaic::cache

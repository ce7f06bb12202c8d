#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace deltaic::cache {

// Stands for a whole prefix: the cache salt and all tokens up to the end of a block.
struct BlockHash {
  std::uint64_t low = 0, high = 0;
  friend bool operator==(const BlockHash&, const BlockHash&) = default;
};

// For hash tables: the value is uniform already.
struct BlockHashBucket {
  std::size_t operator()(const BlockHash& hash) const { return static_cast<std::size_t>(hash.low); }
};

using HashKey = std::array<std::uint64_t, 2>;

// SipHash-2-4 with 128-bit output (Aumasson and Bernstein 2012): a pseudo-random function of `data` under a secret key.
BlockHash sip_hash_128(const HashKey& key, std::span<const std::byte> data);

// Hashes blocks as H(parent, token ids); the first block's parent is H(0, salt). Equal hashes are taken as equal
// prefixes without comparing tokens. That is safe by chance (128 bits: 2^-64 among 2^32 blocks) and against a
// client who looks for a collision, because the key is drawn from the system's entropy and never leaves the process.
class BlockHasher {
 public:
  BlockHasher();  // a fresh key
  explicit BlockHasher(const HashKey& key) : key_(key) {}
  BlockHash root(std::string_view salt) const;
  BlockHash next(const BlockHash& parent, std::span<const std::int32_t> token_ids) const;

 private:
  HashKey key_;
};

}  // namespace deltaic::cache

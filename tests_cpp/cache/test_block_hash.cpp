#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include "cpp/src/cache/block_hash.h"

using namespace deltaic::cache;

namespace {

// The output bytes of SipHash are the two words in little-endian order.
constexpr std::uint64_t from_bytes(std::array<std::uint8_t, 8> bytes) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < 8; ++i) word |= std::uint64_t{bytes[i]} << (8 * i);
  return word;
}

}  // namespace

TEST_CASE("sip_hash_128 gives the published values") {
  // Key 00 01 ... 0f, data 00 01 ...; `openssl mac -macopt size:16 SIPHASH` prints the same.
  const HashKey key{0x0706050403020100U, 0x0f0e0d0c0b0a0908U};
  std::vector<std::byte> data(15);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i);
  CHECK(sip_hash_128(key, {}) == BlockHash{from_bytes({0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6}),
                                           from_bytes({0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93})});
  CHECK(sip_hash_128(key, data) == BlockHash{from_bytes({0x54, 0x93, 0xe9, 0x99, 0x33, 0xb0, 0xa8, 0x11}),
                                             from_bytes({0x7e, 0x08, 0xec, 0x0f, 0x97, 0xcf, 0xc3, 0xd9})});
}

TEST_CASE("a block hash depends on the key, the salt, the parent, and every token in its place") {
  const BlockHasher hasher(HashKey{1, 2}), other_key(HashKey{1, 3});
  std::array<std::int32_t, 16> tokens{};
  std::iota(tokens.begin(), tokens.end(), 0);
  const BlockHash root = hasher.root("");
  const BlockHash hash = hasher.next(root, tokens);
  CHECK(hasher.next(root, tokens) == hash);
  CHECK(hasher.root("a") != root);
  CHECK(hasher.root(std::string_view("\0", 1)) != root);
  CHECK(other_key.next(root, tokens) != hash);
  CHECK(hasher.next(hash, tokens) != hash);
  CHECK(hasher.next({root.low, root.high ^ 1}, tokens) != hash);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    auto changed = tokens;
    changed[i] ^= 1 << 30;
    CHECK(hasher.next(root, changed) != hash);
  }
  std::swap(tokens[3], tokens[4]);
  CHECK(hasher.next(root, tokens) != hash);
}

TEST_CASE("every hasher draws its own key") { CHECK(BlockHasher().root("") != BlockHasher().root("")); }

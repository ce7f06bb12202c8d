#include "cpp/src/cache/block_hash.h"

#include <bit>
#include <cstring>
#include <random>

namespace deltaic::cache {
namespace {

// The running state of SipHash; words are little-endian whatever the machine.
class SipState {
 public:
  explicit SipState(const HashKey& key)
      : v0_(key[0] ^ 0x736f6d6570736575U),
        v1_(key[1] ^ 0x646f72616e646f6dU ^ kWideOutput),
        v2_(key[0] ^ 0x6c7967656e657261U),
        v3_(key[1] ^ 0x7465646279746573U) {}

  void add(std::uint64_t word) {
    v3_ ^= word;
    round();
    round();
    v0_ ^= word;
  }

  // The whole words of `data`; its last 0 to 7 bytes are kept for finish().
  void add(std::span<const std::byte> data) {
    num_bytes_ += data.size();
    for (; data.size() >= 8; data = data.subspan(8)) add(load(data.first(8)));
    rest_ = data;
  }

  BlockHash finish() {
    add(load(rest_) | static_cast<std::uint64_t>(num_bytes_) << 56);
    v2_ ^= kWideOutput;
    const std::uint64_t low = squeeze();
    v1_ ^= 0xdd;
    return {low, squeeze()};
  }

 private:
  static constexpr std::uint64_t kWideOutput = 0xee;

  static std::uint64_t load(std::span<const std::byte> bytes) {
    std::uint64_t word = 0;
    if constexpr (std::endian::native == std::endian::little) {
      if (!bytes.empty()) std::memcpy(&word, bytes.data(), bytes.size());
    } else {
      for (std::size_t i = 0; i < bytes.size(); ++i) word |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
    }
    return word;
  }

  void round() {
    v0_ += v1_, v1_ = std::rotl(v1_, 13) ^ v0_, v0_ = std::rotl(v0_, 32);
    v2_ += v3_, v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_, v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_, v1_ = std::rotl(v1_, 17) ^ v2_, v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t squeeze() {
    for (int i = 0; i < 4; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

  std::uint64_t v0_, v1_, v2_, v3_;
  std::size_t num_bytes_ = 0;
  std::span<const std::byte> rest_;
};

std::uint64_t draw_word() {
  std::random_device entropy;
  return static_cast<std::uint64_t>(entropy()) << 32 | entropy();
}

}  // namespace

BlockHash sip_hash_128(const HashKey& key, std::span<const std::byte> data) {
  SipState state(key);
  state.add(data);
  return state.finish();
}

BlockHasher::BlockHasher() : key_{draw_word(), draw_word()} {}

BlockHash BlockHasher::root(std::string_view salt) const {
  SipState state(key_);
  state.add(0);
  state.add(0);
  state.add(std::as_bytes(std::span(salt)));
  return state.finish();
}

BlockHash BlockHasher::next(const BlockHash& parent, std::span<const std::int32_t> token_ids) const {
  SipState state(key_);
  state.add(parent.low);
  state.add(parent.high);
  state.add(std::as_bytes(token_ids));
  return state.finish();
}

}  // namespace deltaic::cache

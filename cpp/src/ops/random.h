#pragma once

// Counter-based random numbers: each is a pure function of (seed, output position, vocabulary index). Host and device
// compile the same code, hence the C headers.

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define DELTAIC_HOST_DEVICE __host__ __device__
#else
#define DELTAIC_HOST_DEVICE
#endif

namespace deltaic::ops {

struct PhiloxBlock {
  uint32_t word[4];
};

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9U;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85U;

// Philox4x32-10. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
DELTAIC_HOST_DEVICE inline PhiloxBlock philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    const uint32_t high0 = static_cast<uint32_t>(product0 >> 32);
    const uint32_t high1 = static_cast<uint32_t>(product1 >> 32);
    counter = {{high1 ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1), high0 ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// The counter and key of the vocabulary indices 4 * group to 4 * group + 3. The last counter word is free for other
// uses of the same seed and position.
DELTAIC_HOST_DEVICE inline PhiloxBlock random_words(uint64_t seed, uint64_t position, uint32_t group) {
  const PhiloxBlock counter{{group, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0}};
  return philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// 32 uniform bits.
DELTAIC_HOST_DEVICE inline uint32_t random_bits(uint64_t seed, uint64_t position, uint32_t index) {
  return random_words(seed, position, index / 4).word[index % 4];
}

// The largest value of gumbel().
inline constexpr double kMaxGumbel = 22.873857;

// Standard Gumbel noise: the index with the largest logit + gumbel() is a draw from softmax(logits). The uniform number
// is (bits + 1/2) / 2^32, never 0 or 1, and small bits give large noise, where its resolution is finest.
DELTAIC_HOST_DEVICE inline double gumbel(uint32_t bits) {
  const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return -log(-log1p(-uniform));
}

}  // namespace deltaic::ops

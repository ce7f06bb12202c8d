#include "cpp/src/ops/gumbel_argmax.h"

#include <bit>
#include <limits>

#include "cpp/src/ops/logits_row.h"
#include "cpp/src/ops/random.h"

namespace deltaic::ops {
namespace {

// Covers the f32 rounding of the bounds below.
constexpr float kSlack = 1e-3F;

// Not below gumbel(bits), and cheap: gumbel(bits) <= -ln(u) for its uniform number u >= (bits / 2) / 2^31, and the bits
// of a float, read as an integer, are a lower bound of its log2.
inline float gumbel_bound(std::uint32_t bits) {
  const auto half = static_cast<float>(static_cast<std::int32_t>(bits >> 1));
  const auto log2_bound = static_cast<float>(std::bit_cast<std::int32_t>(half)) * 0x1p-23F;
  return (158.0F - log2_bound) * 0.693147181F;
}

// The best score so far. What surely scores less is told by bounds, before the two logarithms are taken.
class Best {
 public:
  Best(float max_logit, float temperature) : max_(max_logit), temperature_(temperature) {}

  void offer(float logit, std::int32_t token_id, std::uint32_t bits) {
    const double score = (static_cast<double>(logit) - max_) / temperature_ + gumbel(bits);
    if (score > score_ || (score == score_ && token_id < token_id_)) {
      score_ = score;
      token_id_ = token_id;
    }
  }
  float relative(float logit) const { return (logit - max_) / temperature_; }
  // What a relative logit plus a noise bound must reach.
  float threshold() const { return static_cast<float>(score_) - kSlack; }
  std::int32_t token_id() const { return token_id_; }

 private:
  float max_, temperature_;
  double score_ = -std::numeric_limits<double>::infinity();
  std::int32_t token_id_ = std::numeric_limits<std::int32_t>::max();
};

constexpr std::size_t kGroups = 32;           // Philox blocks computed side by side
constexpr std::size_t kTokens = 4 * kGroups;  // tokens they serve

// random_words() of kGroups neighbouring groups, word by word: bits[word][group].
inline void random_words_side_by_side(NoiseKey key, std::uint32_t first_group, std::uint32_t (&bits)[4][kGroups]) {
  auto key0 = static_cast<std::uint32_t>(key.seed), key1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (std::size_t g = 0; g < kGroups; ++g) {
    bits[0][g] = first_group + static_cast<std::uint32_t>(g);
    bits[1][g] = static_cast<std::uint32_t>(key.position);
    bits[2][g] = static_cast<std::uint32_t>(key.position >> 32);
    bits[3][g] = 0;
  }
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (std::size_t g = 0; g < kGroups; ++g) {
      const std::uint64_t product0 = std::uint64_t{kPhiloxMultiplier0} * bits[0][g];
      const std::uint64_t product1 = std::uint64_t{kPhiloxMultiplier1} * bits[2][g];
      bits[0][g] = static_cast<std::uint32_t>(product1 >> 32) ^ bits[1][g] ^ key0;
      bits[2][g] = static_cast<std::uint32_t>(product0 >> 32) ^ bits[3][g] ^ key1;
      bits[1][g] = static_cast<std::uint32_t>(product1);
      bits[3][g] = static_cast<std::uint32_t>(product0);
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

}  // namespace

std::int32_t draw(std::span<const float> logits, float max_logit, float temperature, float lowest, NoiseKey key) {
  Best best(max_logit, temperature);
  const auto bits_of = [&](std::size_t id) {
    return random_bits(key.seed, key.position, static_cast<std::uint32_t>(id));
  };
  // One finite score first: -inf reaches no threshold.
  const std::int32_t likeliest = first_index_of(logits, max_logit);
  best.offer(max_logit, likeliest, bits_of(static_cast<std::size_t>(likeliest)));

  std::size_t i = 0;
  for (; i + kTokens <= logits.size(); i += kTokens) {
    const float* x = logits.data() + i;
    const float threshold = best.threshold();
    float relative[kTokens];
    std::int32_t any = 0;
    for (std::size_t j = 0; j < kTokens; ++j) {
      relative[j] = best.relative(x[j]);
      any |= (relative[j] + static_cast<float>(kMaxGumbel) >= threshold) & (x[j] >= lowest);
    }
    if (any == 0) continue;
    std::uint32_t bits[4][kGroups];
    random_words_side_by_side(key, static_cast<std::uint32_t>(i / 4), bits);
    for (std::size_t word = 0; word < 4; ++word) {
      std::int32_t wins = 0;
      for (std::size_t g = 0; g < kGroups; ++g)
        wins |= relative[4 * g + word] + gumbel_bound(bits[word][g]) >= threshold;
      if (wins == 0) continue;
      for (std::size_t g = 0; g < kGroups; ++g) {
        const std::size_t j = 4 * g + word;
        if (relative[j] + gumbel_bound(bits[word][g]) < threshold || x[j] < lowest) continue;
        best.offer(x[j], static_cast<std::int32_t>(i + j), bits[word][g]);
      }
    }
  }
  for (; i < logits.size(); ++i)
    if (logits[i] >= lowest) best.offer(logits[i], static_cast<std::int32_t>(i), bits_of(i));
  return best.token_id();
}

std::int32_t draw(std::span<const Candidate> candidates, float max_logit, float temperature, NoiseKey key) {
  Best best(max_logit, temperature);
  for (const Candidate& c : candidates) {
    const float relative = best.relative(c.logit);
    if (relative + static_cast<float>(kMaxGumbel) < best.threshold()) continue;
    const std::uint32_t bits = random_bits(key.seed, key.position, static_cast<std::uint32_t>(c.token_id));
    if (relative + gumbel_bound(bits) < best.threshold()) continue;
    best.offer(c.logit, c.token_id, bits);
  }
  return best.token_id();
}

}  // namespace deltaic::ops

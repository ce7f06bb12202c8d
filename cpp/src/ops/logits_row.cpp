#include "cpp/src/ops/logits_row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace deltaic::ops {
namespace {

// Elements that a loop takes at a time: enough independent lanes for the compiler to vectorise.
constexpr std::size_t kLanes = 32;

// The lowest argument of exp_of_negative(): what is below adds nothing that shows to a sum of probabilities.
constexpr float kLowestExponent = -87.0F;

// exp(x) for x in [kLowestExponent, 0]. Range reduction by powers of two, then a Taylor polynomial on [-ln2/2, ln2/2].
// Without a branch, so that loops over it vectorise; the clamp is a loop of its own for the same reason.
inline float exp_of_negative(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = x * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3F800000U;
  return p * std::bit_cast<float>(power);
}

}  // namespace

RowMax row_max(std::span<const float> logits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float max[kLanes];
  std::int32_t bad[kLanes] = {};
  for (float& lane : max) lane = -kInfinity;
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    const float* x = logits.data() + i;
    for (std::size_t j = 0; j < kLanes; ++j) max[j] = x[j] > max[j] ? x[j] : max[j];
    for (std::size_t j = 0; j < kLanes; ++j) bad[j] |= !(x[j] < kInfinity);  // NaN or +inf
  }
  for (; i < logits.size(); ++i) {
    max[0] = logits[i] > max[0] ? logits[i] : max[0];
    bad[0] |= !(logits[i] < kInfinity);
  }
  RowMax result{-kInfinity, true};
  for (std::size_t j = 0; j < kLanes; ++j) {
    result.value = max[j] > result.value ? max[j] : result.value;
    result.is_finite = result.is_finite && bad[j] == 0;
  }
  result.is_finite = result.is_finite && std::isfinite(result.value);
  return result;
}

std::int32_t first_index_of(std::span<const float> logits, float value) {
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    std::int32_t any = 0;
    for (std::size_t j = 0; j < kLanes; ++j) any |= logits[i + j] == value;
    if (any != 0) break;
  }
  while (logits[i] != value) ++i;
  return static_cast<std::int32_t>(i);
}

std::int64_t count_above(std::span<const float> logits, float value) {
  std::int32_t count[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) count[j] += logits[i + j] > value;
  std::int64_t total = 0;
  for (; i < logits.size(); ++i) total += logits[i] > value;
  for (const std::int32_t lane : count) total += lane;
  return total;
}

double sum_exp(std::span<const float> logits, float max, float scale, float lowest) {
  double sum[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    const float* x = logits.data() + i;
    float term[kLanes];
    for (std::size_t j = 0; j < kLanes; ++j) term[j] = std::max((x[j] - max) * scale, kLowestExponent);
    for (std::size_t j = 0; j < kLanes; ++j) term[j] = exp_of_negative(term[j]);
    for (std::size_t j = 0; j < kLanes; ++j) {
      const std::uint32_t counts = 0U - static_cast<std::uint32_t>(x[j] >= lowest);  // all bits or none
      term[j] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(term[j]) & counts);
    }
    for (std::size_t j = 0; j < kLanes; ++j) sum[j] += term[j];
  }
  double total = 0;
  for (; i < logits.size(); ++i)
    if (logits[i] >= lowest) total += exp_of_negative(std::max((logits[i] - max) * scale, kLowestExponent));
  for (const double lane : sum) total += lane;
  return total;
}

}  // namespace deltaic::ops

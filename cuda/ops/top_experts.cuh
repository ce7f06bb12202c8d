#pragma once

#include <cmath>
#include <cstdint>

namespace deltaic::cuda {

constexpr int kMaxExperts = 1024, kMaxExpertsPerToken = 32;

template <int kPerLane, class Logit, class Store>
__device__ void top_experts_of(Logit&& logit, int num_experts, int k, bool renormalize, Store&& store) {
  const int lane = threadIdx.x % 32;
  float value[kPerLane];
  unsigned key[kPerLane];  // ordered as the logits; 0: not there, or taken
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * 32 >= num_experts) break;
    const int expert = i * 32 + lane;
    key[i] = 0, value[i] = -INFINITY;
    if (expert >= num_experts) continue;
    value[i] = logit(expert) + 0.0F;  // -0 becomes +0
    const unsigned bits = __float_as_uint(value[i]);
    key[i] = max(1U, (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U);
    largest = value[i] > largest ? value[i] : largest;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, mask));
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * 32 >= num_experts) break;
    if (i * 32 + lane < num_experts) total += value[i] = expf(value[i] - largest);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(~0U, total, mask);

  float chosen_sum = 0.0F;
  int chosen_id = 0;
  float chosen_value = 0.0F;
  for (int j = 0; j < k; ++j) {
    unsigned best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 >= num_experts) break;
      best = max(best, key[i]);
    }
    best = __reduce_max_sync(~0U, best);
    unsigned id = ~0U;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i)
      if (i * 32 < num_experts && key[i] == best) id = i * 32 + lane;
    id = __reduce_min_sync(~0U, id);
    float mine = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * 32 + lane == id) mine = value[i], key[i] = 0;
    mine = __shfl_sync(~0U, mine, id % 32);
    chosen_sum += mine;
    if (lane == j) chosen_id = static_cast<int>(id), chosen_value = mine;
  }
  if (lane < k) store(lane, chosen_id, chosen_value / (renormalize ? chosen_sum : total));
}

// The router's choice for one token, by one warp: softmax over all experts in f32, the k largest logits (ties: the
// lower id), renormalised when asked. k is at most 32; logit(expert) is called for each expert by one lane, and lane
// j < k calls store(j, id, weight), best first.
template <class Logit, class Store>
__device__ void top_experts(Logit&& logit, int num_experts, int k, bool renormalize, Store&& store) {
  if (num_experts <= 256)
    top_experts_of<8>(logit, num_experts, k, renormalize, store);
  else
    top_experts_of<kMaxExperts / 32>(logit, num_experts, k, renormalize, store);
}

}  // namespace deltaic::cuda

// The largest logit of a row, and a draw from its softmax: the largest logit / temperature + Gumbel noise.
//   a draw compares f32 values with a slack, and takes the f64 logarithms only where two tokens are that close
//   random numbers of 4 neighbours are computed at once, and only where one of them may still win
#pragma once

#include "cpp/src/ops/random.h"
#include "cuda/ops/sampler_block.cuh"

namespace deltaic::cuda::sampler_detail {

// Not below any gumbel().
constexpr float kMaxNoise = static_cast<float>(ops::kMaxGumbel) + 1e-5F;
// Covers the rounding of f32 scores.
constexpr float kSlack = 1e-3F;
constexpr float kLog2E = 1.44269504F;

// What scores are relative to.
struct Scale {
  float max_logit, temperature, inverse;
  __device__ Scale(float max_logit_, float temperature_)
      : max_logit(max_logit_), temperature(temperature_), inverse(1.0F / temperature_) {}
  __device__ float relative(float logit) const { return (logit - max_logit) * inverse; }
};

// gumbel() to f32 accuracy.
__device__ inline float approximate_gumbel(std::uint32_t bits) {
  constexpr float kUlp = 0x1p-32F;
  const bool is_small = bits < 0x80000000U;
  const float exponential =
      is_small ? -log1pf(-(static_cast<float>(bits) + 0.5F) * kUlp) : -logf((static_cast<float>(~bits) + 0.5F) * kUlp);
  return -logf(exponential);
}

// Whether `a` wins over `b`, the lower id where both score the same.
__device__ __noinline__ bool beats_exactly(Draw a, Draw b, float temperature) {
  const double difference =
      (static_cast<double>(a.logit) - static_cast<double>(b.logit)) / static_cast<double>(temperature) +
      (ops::gumbel(a.bits) - ops::gumbel(b.bits));
  return difference > 0 || (difference == 0 && a.id < b.id);
}
__device__ inline bool beats(const Draw& a, const Draw& b, const Scale& scale) {
  if (a.id < 0 || b.id < 0) return a.id >= 0;
  if (fabsf(a.score - b.score) > kSlack) return a.score > b.score;
  return beats_exactly(a, b, scale.temperature);
}

__device__ inline Draw no_draw() { return {-infinity(), -infinity(), 0U, -1}; }
__device__ inline Draw draw_of(float logit, int id, std::uint32_t bits, const Scale& scale) {
  return {scale.relative(logit) + approximate_gumbel(bits), logit, bits, id};
}

// The best of `best`, which all lanes have the same, and of each lane's `mine`. All lanes call it.
__device__ inline void merge_warp(Draw& best, const Draw& mine, const Scale& scale) {
  unsigned left = __ballot_sync(~0U, beats(mine, best, scale));
  while (left != 0) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    best = {__shfl_sync(~0U, mine.score, lane), __shfl_sync(~0U, mine.logit, lane), __shfl_sync(~0U, mine.bits, lane),
            __shfl_sync(~0U, mine.id, lane)};
    left &= __ballot_sync(~0U, static_cast<int>(threadIdx.x % 32) != lane && beats(mine, best, scale));
  }
}

// The best of a block in warp 0. All threads call it.
__device__ inline Draw merge_block(Shared& s, const Draw& best_of_warp, const Scale& scale) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) s.warp_draws[warp] = best_of_warp;
  __syncthreads();
  Draw best = no_draw();
  if (warp == 0) merge_warp(best, lane < kWarps ? s.warp_draws[lane] : no_draw(), scale);
  return best;
}
// The id of the best of the cluster, in every thread.
__device__ inline int merge_cluster(Shared& s, const Cluster& cluster, const Draw& best_of_warp, const Scale& scale) {
  const Draw best_of_block = merge_block(s, best_of_warp, scale);
  if (threadIdx.x == 0) s.block_draw = best_of_block;
  cluster.sync();
  const auto lane = static_cast<int>(threadIdx.x % 32);
  Draw best = no_draw();
  merge_warp(best, lane < cluster.size ? *cluster.at(&s.block_draw, lane) : no_draw(), scale);
  return best.id;
}

// Draws among the tokens that one warp is shown, 4 a lane and call.
class WarpDraw {
 public:
  __device__ WarpDraw(const Scale& scale, std::uint64_t seed, int position)
      : scale_(scale), seed_(seed), position_(static_cast<std::uint32_t>(position)), best_(no_draw()) {}

  // The tokens id, ..., id + 3, id a multiple of 4; may_win(logit, id) says which take part. All lanes call it.
  template <class MayWin>
  __device__ void offer(int id, float4 v, MayWin may_win) {
    const float reach = best_.score - kSlack;  // a score that may win is over this
    const float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    if (!__any_sync(~0U, scale_.relative(largest) + kMaxNoise >= reach)) return;
    // Opaque to the compiler, or it keeps the keys of all rounds in registers.
    std::uint32_t key0 = static_cast<std::uint32_t>(seed_), key1 = static_cast<std::uint32_t>(seed_ >> 32);
    asm volatile("" : "+r"(key0), "+r"(key1));
    const ops::PhiloxBlock random =
        ops::random_words(std::uint64_t{key1} << 32 | key0, position_, static_cast<std::uint32_t>(id) / 4);
    const float logits[4] = {v.x, v.y, v.z, v.w};
    unsigned passes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // noise <= -ln(uniform): the uniform number, rounded down to 23 bits, is at most e^-(noise that is needed).
      const float limit = exp2f((logits[i] - scale_.max_logit) * (scale_.inverse * kLog2E) - reach * kLog2E);
      const float uniform_plus_1 = __uint_as_float(0x3F800000U | random.word[i] >> 9);
      if (uniform_plus_1 <= 1.0F + limit && logits[i] > -infinity()) passes |= 1U << i;
    }
    if (__any_sync(~0U, passes != 0)) look(id, logits, random, passes, may_win);
  }
  __device__ const Draw& best() const { return best_; }

 private:
  // Takes the token with the largest bound of all lanes, until no bound reaches the best score.
  template <class MayWin>
  __device__ void look(int id, const float (&logits)[4], const ops::PhiloxBlock& random, unsigned passes,
                       MayWin may_win) {
    float bounds[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bounds[i] = (passes >> i & 1U) != 0 && may_win(logits[i], id + i)
                      ? scale_.relative(logits[i]) - __logf((static_cast<float>(random.word[i]) + 0.5F) * 0x1p-32F)
                      : -infinity();
    while (true) {
      float bound = bounds[0], logit = logits[0];
      std::uint32_t bits = random.word[0];
      int which = 0;
#pragma unroll
      for (int i = 1; i < 4; ++i)
        if (bounds[i] > bound) bound = bounds[i], logit = logits[i], bits = random.word[i], which = i;
      const std::uint32_t order = bound > -infinity() ? ordered(bound) : 0U;
      const std::uint32_t most = __reduce_max_sync(~0U, order);
      if (most == 0 || most < ordered(best_.score - kSlack)) return;
      const int lane = __ffs(static_cast<int>(__ballot_sync(~0U, order == most))) - 1;
      const Draw token = draw_of(__shfl_sync(~0U, logit, lane), __shfl_sync(~0U, id + which, lane),
                                 __shfl_sync(~0U, bits, lane), scale_);
      if (beats(token, best_, scale_)) best_ = token;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (static_cast<int>(threadIdx.x % 32) == lane && which == i) bounds[i] = -infinity();
    }
  }

  Scale scale_;
  std::uint64_t seed_;
  std::uint32_t position_;
  Draw best_;
};

// The best token that one thread is shown.
class ThreadMax {
 public:
  __device__ void offer(int id, float4 v) {
    const float largest = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    // A sum is NaN where a term is; one that overflows only costs the closer look.
    const float sum = (v.x + v.y) + (v.z + v.w);
    if (largest <= best_ && sum == sum) return;
    look(id, v.x), look(id + 1, v.y), look(id + 2, v.z), look(id + 3, v.w);
  }
  __device__ Key key() const { return is_bad_ ? kNotFinite : key_of(best_, id_); }

 private:
  __device__ void look(int id, float logit) {
    is_bad_ = is_bad_ || !(logit < infinity());
    if (logit > best_) best_ = logit, id_ = id;
  }
  float best_ = -infinity();
  int id_ = 0x7FFFFFFF;
  bool is_bad_ = false;
};

// Whether a row with this largest key can be sampled.
__device__ inline bool is_finite(Key largest) { return largest != kNotFinite && logit_of(largest) > -infinity(); }

}  // namespace deltaic::cuda::sampler_detail

#include <array>
#include <cmath>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"
#include "cpp/src/ops/rotary.h"

namespace deltaic::cpu {
namespace {

struct Angles {
  std::array<float, kMaxHeadDim / 2> cos, sin;
};

void angles_of(const ops::QkNormRopeArgs& args, std::int64_t token, Angles& angles) {
  const ops::RotaryTable& rotary = *args.rotary;
  const bool has_streams = args.positions.shape[0] == 3;
  for (std::size_t j = 0; j < rotary.inv_freq.size(); ++j) {
    const std::int64_t stream = has_streams ? rotary.stream[j] : 0;
    const std::int64_t position = args.positions.as<std::int64_t>()[stream * args.positions.stride[0] + token];
    const float angle = static_cast<float>(position) * rotary.inv_freq[j];
    angles.cos[j] = std::cos(angle) * rotary.attention_factor;
    angles.sin[j] = std::sin(angle) * rotary.attention_factor;
  }
}

// Stores one token's heads in a cache at `slot`.
void store(const Kernels& kernel, const TensorView& rows, std::int64_t token, const TensorView& cache,
           std::int64_t slot) {
  const std::int64_t block = slot / cache.shape[1], offset = slot % cache.shape[1], element = size_of(cache.dtype);
  for (std::int64_t h = 0; h < rows.shape[1]; ++h) {
    const std::int64_t at = block * cache.stride[0] + offset * cache.stride[1] + h * cache.stride[2];
    kernel.narrow(float_type(cache.dtype), rows.as<float>() + token * rows.stride[0] + h * rows.stride[1],
                  rows.shape[2], static_cast<char*>(cache.data) + at * element);
  }
}

}  // namespace

void qk_norm_rope(ThreadPool& threads, const ops::QkNormRopeArgs& args) {
  const Kernels& kernel = kernels();
  const std::int64_t head_dim = args.q.shape[2], half = args.rotary->rotary_dim / 2;
  const std::int64_t num_slots = args.k_cache.shape[0] * args.k_cache.shape[1];
  DELTAIC_CHECK(head_dim <= kMaxHeadDim, "qk_norm_rope: head_dim is ", head_dim, ", the most is ", kMaxHeadDim);
  const std::int64_t elements = (args.q.shape[1] + 2 * args.k.shape[1]) * head_dim;
  threads.parallel_for(args.q.shape[0], grain_of(2 * elements), [&](std::int64_t begin, std::int64_t end) {
    Angles angles;
    for (std::int64_t t = begin; t < end; ++t) {
      angles_of(args, t, angles);
      for (const bool is_query : {true, false}) {
        const TensorView& x = is_query ? args.q : args.k;
        const TensorView& weight = is_query ? args.q_norm_weight : args.k_norm_weight;
        for (std::int64_t h = 0; h < x.shape[1]; ++h) {
          float* row = x.as<float>() + t * x.stride[0] + h * x.stride[1];
          kernel.rms_norm(row, weight.as<float>(), args.eps, head_dim, row);
          kernel.rotate(angles.cos.data(), angles.sin.data(), half, row);
        }
      }
      const std::int64_t slot = args.slot_mapping.as<std::int64_t>()[t];
      if (slot < 0) continue;
      DELTAIC_CHECK(slot < num_slots, "qk_norm_rope: slot ", slot, " of a cache with ", num_slots, " slots");
      store(kernel, args.k, t, args.k_cache, slot);
      store(kernel, args.v, t, args.v_cache, slot);
    }
  });
}

}  // namespace deltaic::cpu

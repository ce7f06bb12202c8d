// Random numbers of dummy weights: a function of seed and index, the same on every device.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DELTAIC_UNIFORM __host__ __device__
#else
#define DELTAIC_UNIFORM
#endif

namespace deltaic {

// Uniform in [centre - scale, centre + scale), in steps of scale / 2^23.
DELTAIC_UNIFORM inline float uniform(std::uint64_t seed, std::int64_t index, float centre, float scale) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(index) * 0x9E3779B97F4A7C15U;  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  const auto bits = static_cast<std::uint32_t>((z ^ (z >> 31)) >> 40);
  return fmaf(static_cast<float>(bits) - 8388608.0F, scale * 0x1p-23F, centre);
}

}  // namespace deltaic

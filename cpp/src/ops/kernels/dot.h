#pragma once

#include "cpp/src/ops/kernels/vec.h"

namespace deltaic::cpu::DELTAIC_ISA {

// Rows of x in a register tile: 4 rows of W times these must fit the registers.
#if defined(__AVX512F__)
constexpr int kMaxTile = 6;
#else
constexpr int kMaxTile = 3;
#endif

// sums[i][r] = x[i] . w[r] over n elements. Each sum has its own accumulator, in the order of k: its bits do not depend
// on the rest of the tile. Prefetch: what lies `ahead` bytes behind W is fetched meanwhile.
template <class W, int M, bool Prefetch = false>
DELTAIC_INLINE void dot_tile(const char* const (&w)[4], const float* const* x, int64_t n, Vec4* sums,
                             int64_t ahead = 0) {
  Vec acc[4][M];  // every loop over it is unrolled: GCC keeps an indexed array in memory
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) acc[r][i] = Vec{};
  }
  const auto step = [&](int64_t k, auto load_w, auto load_x) __attribute__((always_inline)) {
    Vec xs[M];
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) xs[i] = load_x(x[i] + k);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const Vec value = load_w(w[r] + k * W::kBytes);
#pragma GCC unroll 6
      for (int i = 0; i < M; ++i) acc[r][i] = fma(value, xs[i], acc[r][i]);
    }
  };
  int64_t k = 0;
  if constexpr (Prefetch) {
    for (; k + kLanes <= n; k += kLanes) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) __builtin_prefetch(w[r] + k * W::kBytes + ahead);
      step(k, [](const char* p) { return load<W>(p); }, [](const float* p) { return load(p); });
    }
  }
  for (; k + kLanes <= n; k += kLanes)
    step(k, [](const char* p) { return load<W>(p); }, [](const float* p) { return load(p); });
  if (k < n) {
    const int count = static_cast<int>(n - k);
    step(
        k, [count](const char* p) { return load_partial<W>(p, count); },
        [count](const float* p) { return load_partial(p, count); });
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) sums[i] = sum4(acc[0][i], acc[1][i], acc[2][i], acc[3][i]);
}

}  // namespace deltaic::cpu::DELTAIC_ISA

// y = x W^T by dot products: lanes along k, a register tile of 4 rows of W by up to kMaxTile rows of x.
//   The four rows of W are a quarter of the block apart: four long streams, which the hardware prefetches, where
//   neighbours would be four short ones in the same pages.
//   k is cut in blocks of kBlock; each block's lanes are folded and added to y, so that the order of a sum depends on k
//   alone. One row of tiles (few rows of x) streams W once; more rows keep a tile of x in L1 and a block of W in L2.
#include "cpp/src/ops/kernels/dot.h"

namespace deltaic::cpu::DELTAIC_ISA {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kFewRows = 32;

// Row j of each quarter of W.
template <class W, int M>
void tile(const LinearArgs& args, int64_t m, int64_t j, int64_t k_begin, int64_t k_end, bool prefetch) {
  const int64_t quarter = (args.n + 3) / 4;
  const char* w[4];
  const float* x[M];
  for (int r = 0; r < 4; ++r) {  // a quarter that is shorter repeats its last row; that sum is dropped
    const int64_t row = r * quarter + j;
    w[r] = static_cast<const char*>(args.w) + ((row < args.n ? row : args.n - 1) * args.w_stride + k_begin) * W::kBytes;
  }
  for (int i = 0; i < M; ++i) {
    const int64_t row = args.x_rows != nullptr ? args.x_rows[m + i] : m + i;
    x[i] = args.x + row * args.x_stride + k_begin;
  }
  Vec4 sums[M];
  if (prefetch)
    dot_tile<W, M, true>(w, x, k_end - k_begin, sums, args.w_stride * W::kBytes);
  else
    dot_tile<W, M>(w, x, k_end - k_begin, sums);
  const bool adds_bias = k_begin == 0 && args.bias != nullptr, adds_y = k_begin > 0 || args.accumulate;
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const int64_t row = r * quarter + j;
    if (row >= args.n) break;
    const float bias = adds_bias ? args.bias[row] : 0.0F;
    float* y = args.y + m * args.y_stride + row;
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i, y += args.y_stride) {
      float value = sums[i][r];
      if (adds_y) value += *y;
      if (adds_bias) value += bias;
      *y = value;
    }
  }
}

template <class W>
void tile_of(int rows, const LinearArgs& args, int64_t m, int64_t j, int64_t k_begin, int64_t k_end, bool prefetch) {
  switch (rows) {
    case 1:
      return tile<W, 1>(args, m, j, k_begin, k_end, prefetch);
    case 2:
      return tile<W, 2>(args, m, j, k_begin, k_end, prefetch);
    case 3:
      return tile<W, 3>(args, m, j, k_begin, k_end, prefetch);
#if defined(__AVX512F__)
    case 4:
      return tile<W, 4>(args, m, j, k_begin, k_end, prefetch);
    case 5:
      return tile<W, 5>(args, m, j, k_begin, k_end, prefetch);
    case 6:
      return tile<W, 6>(args, m, j, k_begin, k_end, prefetch);
#endif
    default:
      __builtin_unreachable();
  }
}

template <class W>
void linear_of(const LinearArgs& args) {
  const int64_t quarter = (args.n + 3) / 4, num_tiles = (args.m + kMaxTile - 1) / kMaxTile;
  const auto block_end = [&](int64_t k) { return k + kBlock < args.k ? k + kBlock : args.k; };
  const auto tile_at = [&](int64_t t, int64_t j, int64_t k, bool prefetch) {  // tiles of nearly equal height
    const int64_t m = args.m * t / num_tiles, m_end = args.m * (t + 1) / num_tiles;
    tile_of<W>(static_cast<int>(m_end - m), args, m, j, k, block_end(k), prefetch);
  };
  // x stays in L2. While the last tile uses W its next rows come from memory; one or two rows of x read it as fast as
  // it comes.
  if (args.m <= kFewRows) {
    for (int64_t j = 0; j < quarter; ++j)
      for (int64_t k = 0; k < args.k || k == 0; k += kBlock)
        for (int64_t t = 0; t < num_tiles; ++t) tile_at(t, j, k, args.m > 2 && t == num_tiles - 1);
    return;
  }
  for (int64_t k = 0; k < args.k || k == 0; k += kBlock)
    for (int64_t t = 0; t < num_tiles; ++t)
      for (int64_t j = 0; j < quarter; ++j) tile_at(t, j, k, false);
}

}  // namespace

void linear(const LinearArgs& args) {
  switch (args.w_type) {
    case Float::f32:
      return linear_of<F32>(args);
    case Float::f16:
      return linear_of<F16>(args);
    case Float::bf16:
      return linear_of<BF16>(args);
  }
}

}  // namespace deltaic::cpu::DELTAIC_ISA

#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/attention/attention_params.h"
#include "cuda/device/matrix_load.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/tensor_copy.cuh"

namespace deltaic::cuda {

// Elements between the query rows in shared memory: without bank conflicts.
__host__ __device__ constexpr int query_stride(int dim) { return dim + 8; }

// A warp's running softmax and O^T. Lane 4 * g + q holds query rows 8 * n + 2 * q and + 1 of column n.
template <class T, int kDim, int kColumns>
struct WarpSums {
  float acc[kDim / 16][kColumns][4];  // channels 16 * i + g (and + 8) of the two rows
  float max[kColumns][2], sum[kColumns][2];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][n][c] = 0.0F;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) max[n][0] = max[n][1] = -INFINITY, sum[n][0] = sum[n][1] = 0.0F;
  }

  // S^T of 16 keys, in independent chains of sums.
  __device__ static void scores(std::uint32_t keys, std::uint32_t query, float (&s)[kColumns][4]) {
    constexpr int kChains = kColumns == 1 ? 4 : 1;  // registers are scarce with two columns
    const int lane = threadIdx.x % 32;
    float part[kChains][kColumns][4] = {};
    const int row = lane % 16, unit = lane / 16;
#pragma unroll
    for (int k = 0; k < kDim / 16; k += 2) {
      std::uint32_t q[2][4];
      if constexpr (kColumns == 1) {
        load_matrices(q[0], query + ((lane % 8) * query_stride(kDim) + k * 16 + lane / 8 * 8) * 2);
        q[1][0] = q[0][2], q[1][1] = q[0][3];
      } else {
        const std::uint32_t at =
            query + ((lane % 8 + lane / 16 * 8) * query_stride(kDim) + k * 16 + lane / 8 % 2 * 8) * 2;
        load_matrices(q[0], at);
        load_matrices(q[1], at + 32);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t a[4];
        load_matrices(a, keys + (k + j) / 4 * kBoxBytes + swizzled_offset(row, (k + j) % 4 * 2 + unit));
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
          mma_m16n8k16<T>(part[(k + j) % kChains][n], a[0], a[1], a[2], a[3], q[j][2 * n], q[j][2 * n + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = part[0][n][c];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) s[n][c] += part[chain][n][c];
      }
  }

  // One tile: keys and values are shared addresses; last[n][h] the last key of the tile that a row sees, from its
  // first.
  __device__ void add(std::uint32_t keys, std::uint32_t values, std::uint32_t query, float scale_log2,
                      const int (&last)[kColumns][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    float s[kColumns][4];
    scores(keys, query, s);
    std::uint32_t p[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float kept[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = g <= last[n][h] ? s[n][h] * scale_log2 : -INFINITY;
        const float high = g + 8 <= last[n][h] ? s[n][2 + h] * scale_log2 : -INFINITY;
        float largest = fmaxf(low, high);
        for (int offset = 4; offset < 32; offset *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, offset));
        largest = fmaxf(largest, max[n][h]);
        const float base = largest == -INFINITY ? 0.0F : largest;  // no key is visible yet
        kept[h] = exp2f(max[n][h] - base);
        max[n][h] = largest;
        s[n][h] = exp2f(low - base), s[n][2 + h] = exp2f(high - base);
        sum[n][h] = sum[n][h] * kept[h] + (s[n][h] + s[n][2 + h]);
      }
      p[n][0] = transposed(pack<T>(s[n][0], s[n][1]));
      p[n][1] = transposed(pack<T>(s[n][2], s[n][3]));
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][n][c] *= kept[c % 2];
    }
    const int row = lane % 8 + lane / 16 * 8, unit = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      std::uint32_t a[4];
      load_matrices_transposed(a, values + i / 4 * kBoxBytes + swizzled_offset(row, i % 4 * 2 + unit));
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma_m16n8k16<T>(acc[i][n], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
    }
  }
};

}  // namespace deltaic::cuda

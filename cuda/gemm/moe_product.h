#pragma once

#include <cstdint>

#include "cpp/src/ops/context.h"

// The two matrix products of moe_grouped, over (token, j) pairs sorted by expert.

namespace deltaic::cuda {

constexpr int kMoeBlockPairs = 160;  // the most pairs a block multiplies at once

// Pairs [begin, begin + count) of the sorted order belong to one expert.
struct MoePairTile {
  int expert, begin, count, padding;
};

// up: y[i, :] = silu(gate) * up of x[sorted_pairs[i] / k, :]; down: y[sorted_pairs[i], :] = weight x[i, :].
struct MoeProductArgs {
  bool up;
  int blocks_a_tile;  // 1 or 2: a tile has at most so many times kMoeBlockPairs pairs
  int k;
  TensorView x;              // up: [num_tokens, num_columns]; down: [num_pairs, num_columns]
  TensorView weight;         // [num_experts, num_rows, num_columns], up: the gate rows first
  const MoePairTile* tiles;  // on the device, as the following
  const std::int32_t* num_tiles;
  const std::int32_t* sorted_pairs;
  void* y;  // [num_pairs, up: num_rows / 2, down: num_rows] dtype of x
};

// sm_90a; num_rows (up: num_rows / 2) and num_columns are multiples of 64, bf16 or f16.
void moe_product(ops::Stream stream, const MoeProductArgs& args);

}  // namespace deltaic::cuda

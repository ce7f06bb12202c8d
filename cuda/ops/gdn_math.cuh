#pragma once

#include <cstdint>

// What the GDN kernels share: gates (docs/models.md, "Gated delta rule") and the way from a block to its part of a
// packed sequence.

namespace deltaic::cuda {

__device__ inline float silu(float x) {
  float exponential, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(-1.4426950408889634F * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0F + exponential));
  return x * inverse;
}
__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }
// log of the decay of one token, <= 0.
__device__ inline float log_decay(float a, float A_log, float dt_bias) {
  const float x = a + dt_bias;
  return -expf(A_log) * (x > 20.0F ? x : log1pf(expf(x)));
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0U, value, mask);
  return value;
}

// Pieces of kPiece tokens, counted from each sequence's first token. Piece c of sequence i has the number
// start[i] / kPiece + i + c: no two pieces share one, and num_pieces() bounds them all.
template <int kPiece>
__host__ __device__ constexpr std::int64_t first_piece(std::int64_t start, std::int64_t seq) {
  return start / kPiece + seq;
}
template <int kPiece>
__host__ __device__ constexpr std::int64_t num_pieces(std::int64_t num_tokens, std::int64_t num_seqs) {
  return num_tokens / kPiece + num_seqs;
}

struct Piece {
  int seq = -1;                // -1: a number without a piece
  std::int64_t begin = 0;      // first token of the piece
  std::int64_t seq_begin = 0;  // first and past-the-last token of the sequence
  std::int64_t seq_end = 0;
};

template <int kPiece>
__device__ Piece find_piece(const std::int32_t* start, int num_seqs, std::int64_t number) {
  int low = 0, high = num_seqs - 1;  // the last sequence whose first piece is not past `number`
  if (first_piece<kPiece>(start[0], 0) > number) return {};
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_piece<kPiece>(start[middle], middle) <= number)
      low = middle;
    else
      high = middle - 1;
  }
  const std::int64_t seq_begin = start[low], seq_end = start[low + 1];
  const std::int64_t begin = seq_begin + (number - first_piece<kPiece>(seq_begin, low)) * kPiece;
  if (begin >= seq_end) return {};
  return {.seq = low, .begin = begin, .seq_begin = seq_begin, .seq_end = seq_end};
}

}  // namespace deltaic::cuda

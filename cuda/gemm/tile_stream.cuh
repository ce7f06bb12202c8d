// A stream of weight tiles of 8 rows through shared memory into tensor cores, for 1 to 16 tokens.
//   kSplit warps share a tile: the first takes the lines of 64 columns (128 bytes) 0, kSplit, ..., the next 1, ...;
//   the teams of kSplit warps take tiles in turn
//   a thread copies 2 x 16 bytes of a line into a ring of its own and reads them back alone: no barrier. Copies run
//   kRing lines a warp ahead of the products, across tiles, and never stop. (Loads into registers would: a scoreboard
//   that several loads share waits for the last of them.)
//   a product is m16n8k16 with 16 tokens by 8 rows; columns are permuted alike in tokens and weights, so that each
//   thread's fragments are 16 contiguous bytes
//   L2 gives up the weights first: a step reads them once, and what it reads again has the room
//   partial sums of the warps meet in shared memory, kGroupTiles tiles of each team at a time, in a fixed order: what
//   a row gives does not depend on the number of tokens or blocks
// Kernels that stream much take more than half of an SM's shared memory: one block an SM, and the blocks of the next
// kernel begin to copy their weights where a block of this one has ended, long before the last one has.
#pragma once

#include <cstdint>

#include "cuda/device/async_copy.cuh"
#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/mma.cuh"

namespace deltaic::cuda {

constexpr int kLineColumns = 64;
constexpr int kStreamTileRows = 8;
constexpr int kGroupTiles = 4;     // tiles of a team whose partial sums shared memory holds
constexpr int kTokenPadding = 32;  // elements between rows of tokens in shared memory: no bank conflicts
constexpr int kLongRing = 16, kShortRing = 6;
constexpr std::size_t kOneBlockBytes = 116 * 1024;  // no two blocks with so much shared memory fit on an SM

// The tokens as the left operand: this thread's rows lane / 4 and lane / 4 + 8, at its first column.
template <class T>
struct TokenFragment {
  const T *low, *high;
};

template <class T, int kWarps, int kSplit, bool kManyTokens, int kRing>
class TileStream {
 public:
  static constexpr int kTokens = kManyTokens ? 16 : 8;
  static constexpr int kTeams = kWarps / kSplit;
  static constexpr int kRingBytes = kRing * kWarps * 32 * 32;
  struct Shared {
    uint4 ring[kRing][2][kWarps * 32];
    // The padding keeps the tiles' sums of one token in different banks.
    float partial[kSplit][kGroupTiles * kTeams][kTokens * kStreamTileRows + kStreamTileRows];
  };

  // Columns are in_features, a multiple of 64. rows(tile) is the address of row lane / 4 of a tile, or null for a row
  // that is not there; it is asked once a tile, in order.
  template <class Rows>
  __device__ TileStream(Shared& shared, int in_features, int num_tiles, Rows&& rows)
      : shared_(shared),
        ring_begin_(shared_address(&shared.ring[0][0][threadIdx.x])),
        num_lines_(in_features / kLineColumns),
        num_tiles_(num_tiles),
        next_line_(part()),
        next_tile_(team()) {
    next_row_ = next_tile_ < num_tiles ? row_of(rows, next_tile_) : nullptr;
#pragma unroll
    for (int i = 0; i < kRing; ++i) load(ring_begin_ + i * kSlotBytes, rows);
  }

  // Calls tokens(tile) once a tile, and flush(first_tile, count) with every thread when the sums of these tiles are
  // complete.
  template <class Rows, class Tokens, class Flush>
  __device__ void run(Rows&& rows, Tokens&& tokens, Flush&& flush) {
    const int lane = threadIdx.x % 32;
    std::uint32_t slot = ring_begin_;
    for (int first = 0; first < num_tiles_; first += kGroupTiles * kTeams) {
      const int count = min(kGroupTiles * kTeams, num_tiles_ - first);
      for (int tile = team(); tile < count; tile += kTeams) {
        float even[4] = {}, odd[4] = {};
        TokenFragment<T> x = tokens(first + tile);
        x.low += part() * kLineColumns;
        if constexpr (kManyTokens) x.high += part() * kLineColumns;
#pragma unroll 2
        for (int line = part(); line < num_lines_; line += kSplit) {
          async_copy_wait<kRing - 1>();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 w = load_shared(slot + i * kHalfBytes);
            const uint4 a = *reinterpret_cast<const uint4*>(x.low + i * 32);
            uint4 b{};
            if constexpr (kManyTokens) b = *reinterpret_cast<const uint4*>(x.high + i * 32);
            mma_m16n8k16<T>(even, a.x, b.x, a.y, b.y, w.x, w.y);
            mma_m16n8k16<T>(odd, a.z, b.z, a.w, b.w, w.z, w.w);
          }
          x.low += kSplit * kLineColumns;
          if constexpr (kManyTokens) x.high += kSplit * kLineColumns;
          load(slot, rows);
          slot = slot == ring_begin_ + (kRing - 1) * kSlotBytes ? ring_begin_ : slot + kSlotBytes;
        }
        float* sums = shared_.partial[part()][tile] + lane * 2;  // token group, rows 2 * quad and + 1
        *reinterpret_cast<float2*>(sums) = {even[0] + odd[0], even[1] + odd[1]};
        if constexpr (kManyTokens) *reinterpret_cast<float2*>(sums + 64) = {even[2] + odd[2], even[3] + odd[3]};
      }
      __syncthreads();
      flush(first, count);
      __syncthreads();  // the next group may write
    }
  }

  // The sum of the warps for one element of a group.
  __device__ float sum(int tile, int token, int row) const {
    float value = 0.0F;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) value += shared_.partial[i][tile][token * kStreamTileRows + row];
    return value;
  }

 private:
  __device__ static int part() { return static_cast<int>(threadIdx.x / 32) % kSplit; }
  __device__ static int team() { return static_cast<int>(threadIdx.x / 32) / kSplit; }

  static constexpr std::uint32_t kHalfBytes = kWarps * 32 * sizeof(uint4), kSlotBytes = 2 * kHalfBytes;

  __device__ static uint4 load_shared(std::uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
  }

  // This thread's first address of its row of a tile.
  template <class Rows>
  __device__ static const T* row_of(Rows&& rows, int tile) {
    const T* row = rows(tile);
    return row == nullptr ? nullptr : row + part() * kLineColumns + threadIdx.x % 4 * 8;
  }

  // Copies the next line into a slot of the ring. A warp without a line of a tile has none of the next either.
  template <class Rows>
  __device__ void load(std::uint32_t slot, Rows&& rows) {
    if (next_row_ != nullptr && next_line_ < num_lines_) {
      async_copy_16(slot, next_row_, policy_);
      async_copy_16(slot + kHalfBytes, next_row_ + 32, policy_);
      next_row_ += kSplit * kLineColumns;
    }
    async_copy_commit();
    next_line_ += kSplit;
    if (next_line_ >= num_lines_) {
      next_line_ = part();
      next_tile_ += kTeams;
      next_row_ = next_tile_ < num_tiles_ ? row_of(rows, next_tile_) : nullptr;
    }
  }

  Shared& shared_;
  std::uint64_t policy_ = evict_first_policy();
  std::uint32_t ring_begin_;
  int num_lines_, num_tiles_;
  const T* next_row_;
  int next_line_, next_tile_;
};

// The tokens of a block in shared memory, rows `row` elements apart. Rows that are not there read row 0: what they give
// is not used.
template <class T>
__device__ TokenFragment<T> token_fragment(const T* tokens, int row, int num_tokens) {
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  return {tokens + (group < num_tokens ? group : 0) * row + quad * 8,
          tokens + (group + 8 < num_tokens ? group + 8 : 0) * row + quad * 8};
}

// The weights of a norm for 8 columns of this thread. What no kernel writes can be loaded before the wait.
struct NormFactors {
  float values[8];

  __device__ void load(const float* norm_weight, int column) {
    *reinterpret_cast<float4*>(values) = __ldg(reinterpret_cast<const float4*>(norm_weight + column));
    *reinterpret_cast<float4*>(values + 4) = __ldg(reinterpret_cast<const float4*>(norm_weight + column + 4));
  }
  // Those of the columns that stage_tokens begins with; none without a norm.
  __device__ static NormFactors first(const float* norm_weight, int size) {
    NormFactors factors{};
    if (norm_weight != nullptr && threadIdx.x * 8 < size) factors.load(norm_weight, threadIdx.x * 8);
    return factors;
  }
};

// Writes x[token, :], normed when norm_weight is not null, into shared rows. All threads share a token; each reads back
// only what it wrote itself. Reads x through L2: it may run before the wait for the previous kernel, where that kernel
// did not write x. The caller synchronises the block before it reads.
template <class T, int kWarps>
__device__ void stage_tokens(const T* x, std::int64_t x_stride, int num_tokens, int size, const float* norm_weight,
                             NormFactors factors, float eps, T* shared, int row) {
  constexpr int kStep = kWarps * 32 * 8;
  __shared__ float squares[16][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * 8;
  constexpr int kAtOnce = 8;  // tokens whose loads are under way together
  for (int begin = 0; begin < num_tokens; begin += kAtOnce) {
    float sums[kAtOnce] = {};
    for (int column = first; column < size; column += kStep) {
      uint4 bits[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + i < num_tokens)
          bits[i] = __ldcg(reinterpret_cast<const uint4*>(x + (begin + i) * x_stride + column));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i >= num_tokens) break;
        *reinterpret_cast<uint4*>(shared + (begin + i) * row + column) = bits[i];
        const T* values = reinterpret_cast<const T*>(&bits[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i] += to_float(values[j]) * to_float(values[j]);
      }
    }
    if (norm_weight == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i >= num_tokens) break;
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sums[i] += __shfl_xor_sync(~0U, sums[i], mask);
      if (lane == 0) squares[begin + i][warp] = sums[i];
    }
  }
  if (norm_weight == nullptr) return;
  __syncthreads();
  for (int column = first; column < size; column += kStep) {
    if (column != first) factors.load(norm_weight, column);
    for (int token = 0; token < num_tokens; ++token) {
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += squares[token][i];
      const float scale = rsqrtf(sum / static_cast<float>(size) + eps);
      auto& bits = *reinterpret_cast<uint4*>(shared + token * row + column);
      uint4 copy = bits;
      T* values = reinterpret_cast<T*>(&copy);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = from_float<T>(to_float(values[i]) * scale * factors.values[i]);
      bits = copy;
    }
  }
}

}  // namespace deltaic::cuda

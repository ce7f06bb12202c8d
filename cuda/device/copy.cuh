// Byte copies by one block of threads: 16-byte stores, and 16-byte loads where source and destination agree mod 16.
// Otherwise a vector is put together from aligned 4-byte loads. Nothing outside [src, src + size) is read.
#pragma once

#include <cstdint>

namespace deltaic::cuda {

constexpr int kCopyThreads = 512;
constexpr int kCopyUnroll = 4;  // independent 16-byte vectors in flight a thread
constexpr int kCopyBlocksPerSm = 1;
constexpr std::int64_t kTileVectors = kCopyThreads * kCopyUnroll;
constexpr std::int64_t kTileBytes = kTileVectors * 16;

// States are read and written once, and should not push anything else out of L2.
__device__ inline uint4 load_once(const uint4* p) { return __ldcs(p); }
__device__ inline void store_once(uint4* p, uint4 value) { __stcs(p, value); }

struct Bytes {
  const char* src;
  char* dst;
  std::int64_t size;
};

__device__ inline bool overlaps(const Bytes& copy) {
  const auto src = reinterpret_cast<std::uint64_t>(copy.src), dst = reinterpret_cast<std::uint64_t>(copy.dst);
  return (src > dst ? src - dst : dst - src) < static_cast<std::uint64_t>(copy.size);
}

// Tiles that copy_tile() needs for a copy of any alignment.
__host__ __device__ constexpr std::int64_t num_copy_tiles(std::int64_t size) {
  return (size + kTileBytes - 1) / kTileBytes;
}

// A copy, cut into `head` bytes, then `num_vectors` vectors whose destination is 16-byte aligned, then the rest.
struct VectorCopy {
  const char* src;  // of the first vector
  char* dst;
  std::int64_t head, num_vectors;
  int shift;     // source address mod 4
  bool aligned;  // the source is 16-byte aligned too

  __device__ explicit VectorCopy(const Bytes& copy) {
    head = static_cast<std::int64_t>(-reinterpret_cast<std::uint64_t>(copy.dst) & 15);
    shift = static_cast<int>((reinterpret_cast<std::uint64_t>(copy.src) + static_cast<std::uint64_t>(head)) & 3);
    if (head < shift) head += 16;  // the first vector's aligned loads start within the source
    src = copy.src + head;
    dst = copy.dst + head;
    aligned = (reinterpret_cast<std::uint64_t>(src) & 15) == 0;
    // A shifted vector reads up to the next 4-byte boundary.
    const std::int64_t readable = copy.size - head - (shift == 0 ? 0 : 4 - shift);
    num_vectors = readable < 16 ? 0 : readable / 16;
    if (num_vectors == 0) head = copy.size < head ? copy.size : head;
  }

  // The part of a tile that this thread copies: vectors threadIdx.x, threadIdx.x + kCopyThreads, ... below `count`.
  struct Part {
    const char* src;  // of vector threadIdx.x
    char* dst;
    int count;  // vectors of the tile that are left from there on
    int shift;

    __device__ bool has(int i) const { return i * kCopyThreads < count; }
    template <bool kAligned>
    __device__ uint4 load(int i) const {
      const char* at = src + i * kCopyThreads * 16;
      if constexpr (kAligned) {
        return load_once(reinterpret_cast<const uint4*>(at));
      } else {
        const auto* words = reinterpret_cast<const unsigned*>(at - shift);
        const unsigned w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
        const unsigned w4 = shift == 0 ? 0U : words[4];
        const unsigned bits = static_cast<unsigned>(shift) * 8;
        return {__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits), __funnelshift_r(w2, w3, bits),
                __funnelshift_r(w3, w4, bits)};
      }
    }
    __device__ void store(int i, uint4 value) const {
      store_once(reinterpret_cast<uint4*>(dst + i * kCopyThreads * 16), value);
    }
  };

  __device__ Part part_of(std::int64_t tile) const {
    const std::int64_t offset = tile * kTileBytes + threadIdx.x * 16;
    const std::int64_t left = num_vectors - tile * kTileVectors;
    return {src + offset, dst + offset,
            static_cast<int>(left < kTileVectors ? left : kTileVectors) - static_cast<int>(threadIdx.x), shift};
  }
};

// Loads this thread's part of a tile, then stores it; between() in the middle.
template <bool kAligned, class Between>
__device__ void copy_part(const VectorCopy::Part& part, Between between) {
  uint4 value[kCopyUnroll];
#pragma unroll
  for (int i = 0; i < kCopyUnroll; ++i)
    if (part.has(i)) value[i] = part.load<kAligned>(i);
  between();
#pragma unroll
  for (int i = 0; i < kCopyUnroll; ++i)
    if (part.has(i)) part.store(i, value[i]);
}

// Copies tile `tile` of a copy that does not overlap itself. Tile 0 also copies the bytes before and after the vectors.
__device__ inline void copy_tile(const Bytes& copy, std::int64_t tile) {
  const VectorCopy plan(copy);
  const auto nothing = [] {};
  if (plan.aligned)
    copy_part<true>(plan.part_of(tile), nothing);
  else
    copy_part<false>(plan.part_of(tile), nothing);
  if (tile != 0) return;
  const std::int64_t tail = plan.head + plan.num_vectors * 16;
  if (threadIdx.x < plan.head) copy.dst[threadIdx.x] = copy.src[threadIdx.x];
  if (tail + threadIdx.x < copy.size) copy.dst[tail + threadIdx.x] = copy.src[tail + threadIdx.x];
}

// A copy that overlaps itself, whole, by one block: pieces in the direction of the move (up when dst < src, else
// down), each loaded by all threads, a barrier, stored. Stores of a piece reach no byte that a later piece loads, so
// one barrier a piece is enough. Every thread of the block must call it.
__device__ inline void move_overlapping(const Bytes& copy) {
  const VectorCopy plan(copy);
  const bool up = copy.dst < copy.src;
  const std::int64_t tail = plan.head + plan.num_vectors * 16;

  const auto bytes = [&](std::int64_t begin, std::int64_t end) {  // at most kCopyThreads
    const std::int64_t at = begin + threadIdx.x;
    char value = 0;
    if (at < end) value = copy.src[at];
    __syncthreads();
    if (at < end) copy.dst[at] = value;
  };
  const auto vectors = [&]<bool kAligned>() {
    const std::int64_t num_pieces = (plan.num_vectors + kTileVectors - 1) / kTileVectors;
    for (std::int64_t i = 0; i < num_pieces; ++i)
      copy_part<kAligned>(plan.part_of(up ? i : num_pieces - 1 - i), [] { __syncthreads(); });
  };

  if (up)
    bytes(0, plan.head);
  else
    bytes(tail, copy.size);
  if (plan.aligned)
    vectors.template operator()<true>();
  else
    vectors.template operator()<false>();
  if (up)
    bytes(tail, copy.size);
  else
    bytes(0, plan.head);
}

// The tiles next, next + gridDim.x, ... below `total`, which this block moves. find(tile) tells one thread what a tile
// is; it is called for many tiles at once, so that its memory accesses wait for each other only once in kQueue tiles.
// move(T) is called by all threads. Returns the first tile of this block that is not below `total`.
template <class T, class Find, class Move>
__device__ std::int64_t for_each_tile(std::int64_t next, std::int64_t total, Find find, Move move) {
  constexpr int kQueue = 256;
  static_assert(kQueue <= kCopyThreads);
  __shared__ T queue[kQueue];
  while (next < total) {
    const std::int64_t left = (total - next + gridDim.x - 1) / gridDim.x;
    const int count = left < kQueue ? static_cast<int>(left) : kQueue;
    __syncthreads();  // the last queue is done with
    if (threadIdx.x < count) queue[threadIdx.x] = find(next + threadIdx.x * std::int64_t{gridDim.x});
    __syncthreads();
    for (int i = 0; i < count; ++i) move(queue[i]);
    next += std::int64_t{count} * gridDim.x;
  }
  return next;
}

}  // namespace deltaic::cuda

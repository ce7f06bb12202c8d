// Copies are cut into tiles, so that one large copy uses all threads. A copy that overlaps itself stays whole.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/batch_memcpy.h"

namespace deltaic::cpu {

namespace {

constexpr std::int64_t kTileBytes = std::int64_t{1} << 18;

std::byte* address(std::int64_t bits) { return std::bit_cast<std::byte*>(bits); }

bool overlaps(std::int64_t src, std::int64_t dst, std::int64_t size) {
  const auto a = static_cast<std::uint64_t>(src), b = static_cast<std::uint64_t>(dst);
  return (a > b ? a - b : b - a) < static_cast<std::uint64_t>(size);
}

}  // namespace

void batch_memcpy(ThreadPool& threads, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes) {
  const auto* src = src_ptrs.as<std::int64_t>();
  const auto* dst = dst_ptrs.as<std::int64_t>();
  const std::int64_t num_copies = sizes.shape[0];
  const auto size_of_copy = [&](std::int64_t i) -> std::int64_t {
    return sizes.dtype == DType::i32 ? sizes.as<std::int32_t>()[i] : sizes.as<std::int64_t>()[i];
  };

  std::vector<std::int64_t> first_tile(static_cast<std::size_t>(num_copies) + 1, 0);
  for (std::int64_t i = 0; i < num_copies; ++i) {
    const std::int64_t size = size_of_copy(i);
    DELTAIC_CHECK(size >= 0, "batch_memcpy: sizes[", i, "] is ", size);
    const std::int64_t num_tiles = overlaps(src[i], dst[i], size) ? 1 : (size + kTileBytes - 1) / kTileBytes;
    first_tile[static_cast<std::size_t>(i) + 1] = first_tile[static_cast<std::size_t>(i)] + num_tiles;
  }

  threads.parallel_for(first_tile.back(), 1, [&](std::int64_t begin, std::int64_t end) {
    auto copy = std::upper_bound(first_tile.begin(), first_tile.end(), begin) - first_tile.begin() - 1;
    for (std::int64_t tile = begin; tile < end; ++tile) {
      while (first_tile[static_cast<std::size_t>(copy) + 1] <= tile) ++copy;
      const auto at = static_cast<std::size_t>(copy);
      const std::int64_t size = size_of_copy(copy);
      const bool whole = first_tile[at + 1] - first_tile[at] == 1;
      const std::int64_t offset = (tile - first_tile[at]) * kTileBytes;
      const std::int64_t count = whole ? size : std::min(kTileBytes, size - offset);
      std::memmove(address(dst[copy]) + offset, address(src[copy]) + offset, static_cast<std::size_t>(count));
    }
  });
}

}  // namespace deltaic::cpu

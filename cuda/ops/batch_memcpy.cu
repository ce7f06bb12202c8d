// Many copies in one launch, their sizes known to the device alone.
//   a persistent grid; every block counts the tiles of kCopyThreads copies at a time, and takes each gridDim-th tile
//   a copy that overlaps itself is one tile
//   bound by memory: reads and writes every byte once
#include "cpp/src/ops/batch_memcpy.h"

#include <algorithm>

#include "cuda/device/copy.cuh"
#include "cuda/device/scan.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr std::int64_t kMaxBlocksPerCopy = 128;
// Registers for two: the first blocks of the next kernel can wait beside the last ones of this.
constexpr int kResidentBlocks = 2;

struct CopyTile {
  Bytes copy;
  std::int64_t tile;
};

template <class Size>
__global__ void __launch_bounds__(kCopyThreads, kResidentBlocks)
    batch_memcpy_kernel(const std::uint64_t* src_ptrs, const std::uint64_t* dst_ptrs, const Size* sizes,
                        std::int64_t num_copies) {
  __shared__ Bytes copies[kCopyThreads];
  __shared__ std::int64_t tile_ends[kCopyThreads];
  std::int64_t first = blockIdx.x;  // this block's next tile, counted from the first tile of the current copies
  allow_next_kernel();
  wait_for_previous_kernel();
  const auto read = [&](std::int64_t id) -> Bytes {
    if (id >= num_copies) return {};
    return {reinterpret_cast<const char*>(src_ptrs[id]), reinterpret_cast<char*>(dst_ptrs[id]), sizes[id]};
  };
  Bytes own = read(threadIdx.x);
  for (std::int64_t base = 0; base < num_copies; base += kCopyThreads) {
    std::int64_t num_tiles = 0;
    if (own.size > 0 && own.src != own.dst) num_tiles = overlaps(own) ? 1 : num_copy_tiles(own.size);
    __syncthreads();  // the last round's copies are done with
    copies[threadIdx.x] = own;
    tile_ends[threadIdx.x] = inclusive_block_sum<kCopyThreads>(num_tiles);
    __syncthreads();
    own = read(base + kCopyThreads + threadIdx.x);  // of the next round, while this one copies
    const std::int64_t total = tile_ends[kCopyThreads - 1];
    const auto find = [&](std::int64_t tile) -> CopyTile {
      int copy = 0;  // the first with tile_ends > tile
#pragma unroll
      for (int step = kCopyThreads / 2; step > 0; step /= 2)
        if (tile_ends[copy + step - 1] <= tile) copy += step;
      return {copies[copy], tile - (copy == 0 ? 0 : tile_ends[copy - 1])};
    };
    const auto move = [](const CopyTile& tile) {
      if (overlaps(tile.copy))
        move_overlapping(tile.copy);
      else
        copy_tile(tile.copy, tile.tile);
    };
    first = for_each_tile<CopyTile>(first, total, find, move);
    first -= total;
  }
}

}  // namespace

void batch_memcpy(ops::Stream stream, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes) {
  const DeviceGuard guard(src_ptrs.device.index);
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, src_ptrs.device.index));
  const std::int64_t num_copies = sizes.shape[0];
  const std::int64_t num_blocks = std::min<std::int64_t>(num_sms * kCopyBlocksPerSm, num_copies * kMaxBlocksPerCopy);
  const DependentLaunch launch{
      .grid = dim3(static_cast<unsigned>(num_blocks)), .block = dim3(kCopyThreads), .stream = native(stream)};
  const auto* src = static_cast<const std::uint64_t*>(src_ptrs.data);
  const auto* dst = static_cast<const std::uint64_t*>(dst_ptrs.data);
  if (sizes.dtype == DType::i32)
    launch(batch_memcpy_kernel<std::int32_t>, src, dst, static_cast<const std::int32_t*>(sizes.data), num_copies);
  else
    launch(batch_memcpy_kernel<std::int64_t>, src, dst, static_cast<const std::int64_t*>(sizes.data), num_copies);
}

}  // namespace deltaic::cuda

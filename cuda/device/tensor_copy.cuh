#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/bulk_copy.cuh"

// Copies of boxes of a tensor to shared memory by the copy engine (sm_90); barriers are those of bulk_copy.cuh.

namespace deltaic::cuda {

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box whose first element has the coordinates (x, y, z, w), innermost dimension first.
__device__ inline void tensor_load(void* shared, const CUtensorMap* map, int x, int y, int z, int w,
                                   std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}

// The same of a tensor of three dimensions, to this block or to the same place of every block in `blocks` (a bit a
// rank), whose barriers are told.
__device__ inline void tensor_load(void* shared, const CUtensorMap* map, int x, int y, int z, std::uint64_t* barrier,
                                   std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ inline void tensor_load_multicast(void* shared, const CUtensorMap* map, int x, int y, int z,
                                             std::uint64_t* barrier, std::uint16_t blocks, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(blocks), "l"(policy)
      : "memory");
}

// Boxes of 128-byte rows are swizzled: 16-byte unit `unit` of row `row` lies at this offset from a box that starts at a
// multiple of 1024 bytes.
__device__ inline int swizzled_offset(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

}  // namespace deltaic::cuda

#pragma once

#include <cstdint>

#include "cuda/device/bulk_copy.cuh"

namespace deltaic::cuda {

// Copies to the same place of every block in `blocks` (a bit a rank), and tells the barrier of each.
__device__ inline void bulk_load_multicast(void* shared, const void* global, std::uint32_t num_bytes,
                                           std::uint64_t* barrier, std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(num_bytes), "r"(shared_address(barrier)), "h"(blocks)
      : "memory");
}

// Arrives at the barrier of block `rank` of the cluster that lies where `barrier` does in this block. What this thread
// wrote is not made visible there: it says that something was read.
__device__ inline void barrier_arrive_at(std::uint64_t* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

}  // namespace deltaic::cuda

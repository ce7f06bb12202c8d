#pragma once

#include <cstdint>

// Copies of 16 bytes from global to shared memory that a thread does not wait for.

namespace deltaic::cuda {

__device__ inline void async_copy_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// What is read once should leave L2 first.
__device__ inline std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void async_copy_16(std::uint32_t shared, const void* global, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "l"(policy)
               : "memory");
}

__device__ inline void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Arrives at a barrier of shared memory when this thread's copies so far have ended; one of the arrivals it counts.
__device__ inline void async_copy_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until at most N of this thread's groups are unfinished.
template <int N>
__device__ inline void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace deltaic::cuda

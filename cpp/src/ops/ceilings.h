#pragma once

#include <ctime>

#include "cpp/src/core/thread_pool.h"

// What this machine can do at most: the bounds that measured times are held against.

namespace deltaic::cpu {

// Wall time, or with one thread its CPU time, which other programs of a busy machine disturb less.
class Clock {
 public:
  explicit Clock(const ThreadPool& threads);
  double seconds() const;

 private:
  clockid_t id_;
};

// GB/s of all threads reading memory that no cache holds; best of several passes.
double measure_read_bandwidth(ThreadPool& threads);
// GFLOP/s of all threads in f32 fused multiply-adds on registers, with the widest vectors of the machine.
double measure_fma_peak(ThreadPool& threads);

}  // namespace deltaic::cpu

namespace deltaic::cuda {

// GB/s of reading 1 GiB, and GFLOP/s of a bf16 product of 8192 x 8192 x 8192; best of several runs on the default
// stream. Throw OutOfMemory, DeviceError, Unsupported.
double measure_read_bandwidth(int device_index);
double measure_matrix_peak(int device_index);

}  // namespace deltaic::cuda

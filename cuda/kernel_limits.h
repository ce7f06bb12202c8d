#pragma once

namespace deltaic::cuda {

// Shared memory that a block may have on sm_90, static and dynamic together.
inline constexpr int kMaxSharedBytes = 227 * 1024;

// Lets a kernel use all the shared memory that a block of the device may have. Remembered for each kernel and device.
void allow_all_shared_memory(const void* kernel, int device_index);

// Multiprocessors of a device, remembered.
int num_multiprocessors(int device_index);

}  // namespace deltaic::cuda

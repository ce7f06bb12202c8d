#pragma once

#include <cstddef>

// What is needed of CUDA outside of ops: which devices there are, and copies that wait.

namespace deltaic::cuda {

// 0 in a build without CUDA, and on a machine without a GPU or its driver.
int num_devices();

// Waits for everything that was enqueued on a device.
void wait_for_device(int device_index);

// Copies num_bytes between host and device memory, in any direction, and waits for everything that was enqueued on the
// devices before.
void copy_and_wait(void* dst, const void* src, std::size_t num_bytes);

}  // namespace deltaic::cuda

#pragma once

#include <cstddef>

namespace deltaic::cuda {

// What kernels may ask of a device. Facts are remembered, for each device.

// Shared memory that a block may have, static and dynamic together.
std::size_t max_shared_bytes(int device_index);

// Lets a kernel use all the shared memory that a block of the device may have. Remembered for each kernel and device.
void allow_all_shared_memory(const void* kernel, int device_index);

int num_multiprocessors(int device_index);

// What the kernels that the device runs were compiled for, as 10 * major + minor: __CUDA_ARCH__ / 10 inside them. At
// most the device's compute capability; less where the driver compiled PTX of an older one. Throws Unsupported where
// the build has no kernels for the device.
int kernel_architecture(int device_index);

// Programmatic dependent launch, clusters of up to 8 blocks, bulk copies.
inline bool has_clusters(int device_index) { return kernel_architecture(device_index) >= 90; }
// Besides, 227 KiB of shared memory a block, and copies to many blocks of a cluster: sm_90, sm_100.
inline bool has_large_clusters(int device_index) {
  return has_clusters(device_index) && kernel_architecture(device_index) < 120;
}
// sm_90a: wgmma too, and clusters of 16 blocks.
inline bool is_hopper(int device_index) { return kernel_architecture(device_index) == 90; }

}  // namespace deltaic::cuda

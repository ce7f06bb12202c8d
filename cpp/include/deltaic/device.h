#pragma once

#include <cstdint>
#include <string>

#include <deltaic/tensor.h>

namespace deltaic {

// CUDA devices that this process may use, numbered as CUDA_VISIBLE_DEVICES has them. 0 in a build without CUDA, and on
// a machine without a GPU or its driver.
int num_cuda_devices();

struct DeviceMemory {
  std::int64_t free_bytes = 0;  // of all that use the device
  std::int64_t total_bytes = 0;
};
// Throws InvalidArgument for the CPU or a device that there is not, Unsupported where num_cuda_devices() is 0.
DeviceMemory device_memory(Device device);

// What the driver calls a CUDA device: "NVIDIA H200". Throws as device_memory.
std::string device_name(Device device);

}  // namespace deltaic

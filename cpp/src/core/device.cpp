#include <deltaic/device.h>

#include "cpp/src/check.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/transfer.h"

namespace deltaic {

int num_cuda_devices() { return cuda::num_devices(); }

namespace {

void check_is_gpu(const char* what, Device device) {
  DELTAIC_CHECK(device.type == DeviceType::cuda, what, " is of a CUDA device, not of the CPU");
  DELTAIC_CHECK(device.index >= 0, "there is no CUDA device ", device.index);
  const int num_devices = cuda::num_devices();
  if (num_devices == 0)
    throw Unsupported(detail::concat(what, ": there is no CUDA device ", device.index,
                                     "; this build is without CUDA, or the machine without a GPU or its driver"));
  DELTAIC_CHECK(device.index < num_devices, "there is no CUDA device ", device.index, ": this process may use ",
                num_devices);
}

}  // namespace

DeviceMemory device_memory(Device device) {
  check_is_gpu("device_memory", device);
  return cuda::device_memory(device.index);
}

std::string device_name(Device device) {
  check_is_gpu("device_name", device);
  return cuda::device_name(device.index);
}

}  // namespace deltaic

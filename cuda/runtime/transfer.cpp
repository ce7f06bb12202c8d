#include "cpp/src/core/transfer.h"

#include "cuda/check.h"
#include "cuda/handles.h"

namespace deltaic::cuda {

int num_devices() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return 0;
  }
  check(code);
  return count;
}

void wait_for_device(int device_index) {
  const DeviceGuard guard(device_index);
  check(cudaDeviceSynchronize());
}

void copy_and_wait(void* dst, const void* src, std::size_t num_bytes) {
  for (const void* memory : {static_cast<const void*>(dst), src}) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory));
    if (attributes.type == cudaMemoryTypeDevice) wait_for_device(attributes.device);
  }
  check(cudaMemcpy(dst, src, num_bytes, cudaMemcpyDefault));
}

}  // namespace deltaic::cuda

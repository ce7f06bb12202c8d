#include "cpp/src/core/transfer.h"

#include "cuda/check.h"

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

void copy_and_wait(void* dst, const void* src, std::size_t num_bytes) {
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(dst, src, num_bytes, cudaMemcpyDefault));
}

}  // namespace deltaic::cuda

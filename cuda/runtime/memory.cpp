#include <cuda_runtime_api.h>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cuda/check.h"

namespace deltaic::cuda {

std::shared_ptr<void> allocate(std::size_t num_bytes, int device_index) {
  int previous = 0;
  check(cudaGetDevice(&previous));
  check(cudaSetDevice(device_index));
  void* memory = nullptr;
  const cudaError_t code = cudaMalloc(&memory, num_bytes > 0 ? num_bytes : 1);
  std::shared_ptr<void> owner;
  if (code == cudaSuccess) {
    owner = std::shared_ptr<void>(memory, [](void* pointer) { (void)cudaFree(pointer); });
    check(cudaMemset(memory, 0, num_bytes));
    check(cudaStreamSynchronize(nullptr));  // other streams do not wait for the default one
  }
  check(cudaSetDevice(previous));
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    const DeviceMemory available = device_memory(device_index);
    throw OutOfMemory(detail::concat("no memory for a buffer of ", num_bytes, " bytes on CUDA device ", device_index,
                                     ": ", available.free_bytes, " of ", available.total_bytes,
                                     " bytes are free; lower gpu_memory_utilization, max_num_batched_tokens, "
                                     "max_num_seqs or max_model_len"));
  }
  check(code);
  return owner;
}

}  // namespace deltaic::cuda

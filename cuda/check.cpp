#include "cuda/check.h"

#include "cpp/src/check.h"

namespace deltaic::cuda {

void throw_cuda_error(cudaError_t code, std::source_location at) {
  const std::string message =
      detail::concat(cudaGetErrorName(code), ": ", cudaGetErrorString(code), " (", at.file_name(), ":", at.line(), ")");
  if (code == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

}  // namespace deltaic::cuda

#pragma once

#include <cuda_runtime_api.h>

#include <source_location>

namespace deltaic::cuda {

// OutOfMemory or DeviceError, with the error's name, its text, the file and the line.
[[noreturn]] void throw_cuda_error(cudaError_t code, std::source_location at);

// Throws when a CUDA call failed. Every call goes through it.
inline void check(cudaError_t code, std::source_location at = std::source_location::current()) {
  if (code == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // clear it, or the next check would report this error as its own
  throw_cuda_error(code, at);
}

}  // namespace deltaic::cuda

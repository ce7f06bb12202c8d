#include "cuda/kernel_limits.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "cpp/src/check.h"
#include "cuda/check.h"
#include "cuda/handles.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile for sm_90a, not sm_90: kernels for compute capability 9.0 use wgmma"
#endif

namespace deltaic::cuda {
namespace {

constexpr int kMaxDevices = 64;
using Facts = std::array<std::atomic<int>, kMaxDevices>;  // 0: not known yet

// Facts about the process's kernels and devices: they never change once known, so engines share them.
struct Known {
  std::mutex mutex;
  std::set<std::pair<const void*, int>> kernels;
  Facts num_multiprocessors{}, max_shared_bytes{}, architecture{};
};
Known& known() {
  static Known instance;
  return instance;
}

template <class Read>
int remembered(Facts& facts, int device_index, const Read& read) {
  DELTAIC_CHECK(0 <= device_index && device_index < kMaxDevices, "CUDA device ", device_index);
  std::atomic<int>& fact = facts[static_cast<std::size_t>(device_index)];
  if (fact == 0) fact = read();
  return fact;
}

int attribute(cudaDeviceAttr which, int device_index) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device_index));
  return value;
}

// Never launched: its attributes tell for which architecture this library was compiled.
__global__ void architecture_kernel() {}

}  // namespace

void allow_all_shared_memory(const void* kernel, int device_index) {
  const std::lock_guard lock(known().mutex);
  if (known().kernels.contains({kernel, device_index})) return;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel));
  check(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(max_shared_bytes(device_index)) - static_cast<int>(attributes.sharedSizeBytes)));
  known().kernels.emplace(kernel, device_index);
}

int num_multiprocessors(int device_index) {
  return remembered(known().num_multiprocessors, device_index,
                    [&] { return attribute(cudaDevAttrMultiProcessorCount, device_index); });
}

std::size_t max_shared_bytes(int device_index) {
  return static_cast<std::size_t>(remembered(known().max_shared_bytes, device_index, [&] {
    return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index);
  }));
}

int kernel_architecture(int device_index) {
  return remembered(known().architecture, device_index, [&] {
    const DeviceGuard guard(device_index);
    cudaFuncAttributes attributes{};
    const cudaError_t code = cudaFuncGetAttributes(&attributes, architecture_kernel);
    if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction) {
      (void)cudaGetLastError();
      throw Unsupported(detail::concat(
          "this build of deltaic has no kernels for CUDA device ", device_index, " of compute capability ",
          attribute(cudaDevAttrComputeCapabilityMajor, device_index), ".",
          attribute(cudaDevAttrComputeCapabilityMinor, device_index), ": add it to CMAKE_CUDA_ARCHITECTURES"));
    }
    check(code);
    return attributes.ptxVersion;
  });
}

}  // namespace deltaic::cuda

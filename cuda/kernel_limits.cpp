#include "cuda/kernel_limits.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "cpp/src/check.h"
#include "cuda/check.h"

namespace deltaic::cuda {
namespace {

constexpr int kMaxDevices = 64;

// Facts about the process's kernels and devices: they never change once known, so engines share them.
struct Known {
  std::mutex mutex;
  std::set<std::pair<const void*, int>> kernels;
  std::array<std::atomic<int>, kMaxDevices> num_multiprocessors{};
};
Known& known() {
  static Known instance;
  return instance;
}

}  // namespace

void allow_all_shared_memory(const void* kernel, int device_index) {
  const std::lock_guard lock(known().mutex);
  if (known().kernels.contains({kernel, device_index})) return;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel));
  int available = 0;
  check(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             available - static_cast<int>(attributes.sharedSizeBytes)));
  known().kernels.emplace(kernel, device_index);
}

int num_multiprocessors(int device_index) {
  DELTAIC_CHECK(0 <= device_index && device_index < kMaxDevices, "CUDA device ", device_index);
  std::atomic<int>& count = known().num_multiprocessors[static_cast<std::size_t>(device_index)];
  if (count == 0) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device_index));
    count = value;
  }
  return count;
}

}  // namespace deltaic::cuda

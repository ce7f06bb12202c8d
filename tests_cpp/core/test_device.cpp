#include <deltaic/device.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/buffer.h"
#include "tests_cpp/support/on_device.h"

using namespace deltaic;

TEST_CASE("device_memory is of a CUDA device that is there") {
  CHECK_THROWS_WITH_AS(device_memory({}), doctest::Contains("not of the CPU"), InvalidArgument);
  CHECK_THROWS_AS(device_memory({DeviceType::cuda, -1}), InvalidArgument);
  if (num_cuda_devices() == 0) {
    CHECK_THROWS_AS(device_memory(test::kGpu), Error);
    return;
  }
  CHECK_THROWS_WITH_AS(device_memory({DeviceType::cuda, num_cuda_devices()}), doctest::Contains("there is no"),
                       InvalidArgument);
  const DeviceMemory before = device_memory(test::kGpu);
  CHECK(0 < before.free_bytes);
  CHECK(before.free_bytes <= before.total_bytes);
  const Buffer buffer(std::size_t{256} << 20, test::kGpu);
  CHECK(device_memory(test::kGpu).free_bytes < before.free_bytes);
}

TEST_CASE("device_name is of a CUDA device that is there") {
  CHECK_THROWS_WITH_AS(device_name({}), doctest::Contains("not of the CPU"), InvalidArgument);
  if (num_cuda_devices() == 0) {
    CHECK_THROWS_AS(device_name(test::kGpu), Error);
    return;
  }
  CHECK_FALSE(device_name(test::kGpu).empty());
}

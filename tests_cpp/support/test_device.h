#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <deltaic/device.h>

#include "cpp/src/core/transfer.h"

namespace deltaic::test {

// The device of the tests that run on one of the user's choice: DELTAIC_TEST_DEVICE is cpu (the default) or cuda, the
// first GPU.
inline Device test_device() {
  const char* chosen = std::getenv("DELTAIC_TEST_DEVICE");
  if (chosen == nullptr || std::string_view(chosen) == "cpu") return {};
  if (std::string_view(chosen) == "cuda") return {DeviceType::cuda, 0};
  throw std::runtime_error("DELTAIC_TEST_DEVICE is cpu or cuda, not " + std::string(chosen));
}
inline bool on_cuda() { return test_device().type == DeviceType::cuda; }

// The first `count` elements of row `row` of a view of any device; -1: as far as the next row, gaps included, which the
// last row need not have.
template <class T>
std::vector<T> host_row(const TensorView& view, std::int64_t row, std::int64_t count = -1) {
  const T* data = view.as<T>() + row * view.stride[0];
  if (count < 0) count = view.stride[0];
  std::vector<T> values(static_cast<std::size_t>(count));
  if (view.device.type == DeviceType::cuda)
    cuda::copy_and_wait(values.data(), data, values.size() * sizeof(T));
  else
    values.assign(data, data + count);
  return values;
}

}  // namespace deltaic::test

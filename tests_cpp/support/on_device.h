#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/transfer.h"
#include "tests_cpp/support/tensors.h"

namespace deltaic::test {

inline constexpr Device kGpu{DeviceType::cuda, 0};

// Whether tests on a GPU can run; says once that they are skipped.
inline bool has_gpu() {
  static const bool found = [] {
    const bool any = cuda::num_devices() > 0;
    if (!any) MESSAGE("skipped: no CUDA device in this build or machine");
    return any;
  }();
  return found;
}

inline std::span<const std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.data(), static_cast<std::size_t>(view.rank)};
}

inline Tensor to_gpu(const Tensor& tensor) {
  Tensor copy(tensor.view().dtype, shape_of(tensor.view()), kGpu);
  if (tensor.view().numel() > 0) cuda::copy_and_wait(copy.view().data, tensor.view().data, tensor.view().num_bytes());
  return copy;
}

inline Tensor to_host(const Tensor& tensor) {
  Tensor copy(tensor.view().dtype, shape_of(tensor.view()));
  if (tensor.view().numel() > 0) cuda::copy_and_wait(copy.view().data, tensor.view().data, tensor.view().num_bytes());
  return copy;
}

// |actual - expected| / |expected| in the Euclidean norm; infinite when a value is not finite.
inline double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return norm == 0.0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace deltaic::test

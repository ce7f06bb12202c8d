#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/ops/context.h"
#include "cuda/gemm/cublaslt.h"

namespace deltaic::cuda {

class Matmul {
 public:
  explicit Matmul(int device_index);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // y = x W^T, or y += it; sums in f32, no TF32.
  //   x [num_tokens, in_features], weight [out_features, in_features], y [num_tokens, out_features]; one dtype of f16
  //   and bf16; y may be f32. Rows contiguous; row starts 16-byte aligned.
  // The first call allocates, and must not be captured in a graph. Throws Unsupported where cuBLASLt is missing,
  // DeviceError where it fails.
  void run(ops::Stream stream, TensorView x, TensorView weight, TensorView y, bool accumulate);

 private:
  struct Plan;
  // num_tokens, out_features, in_features, strides of x, weight and y, dtypes, accumulate
  using Key = std::array<std::int64_t, 9>;
  const Plan& plan_of(const Key& key, DType dtype, DType out_dtype);

  int device_index_;
  cublaslt::Handle handle_ = nullptr;
  Buffer workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace deltaic::cuda

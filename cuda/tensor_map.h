#pragma once

#include <cuda.h>

#include <span>

#include <deltaic/tensor.h>

namespace deltaic::cuda {

// A map for the copy engine (sm_90): boxes of `box` elements of a tensor of f16 or bf16 with `sizes`, the innermost
// dimension first and contiguous, and `strides` in elements of the others. Rows of a box are 128 bytes, swizzled by
// that; what lies outside of the tensor arrives as zeros. `what` names the op in errors.
CUtensorMap make_tensor_map(const char* what, DType dtype, const void* data, std::span<const std::int64_t> sizes,
                            std::span<const std::int64_t> strides, std::span<const int> box);

}  // namespace deltaic::cuda

#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cpp/src/check.h"
#include "cuda/check.h"

namespace deltaic::cuda {
namespace {

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found through the runtime: we do not link libcuda.
EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) throw Unsupported("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTensorMap>(pointer);
  }();
  return function;
}

std::string list(std::span<const std::int64_t> values) {
  std::string text;
  for (const std::int64_t value : values) {
    if (!text.empty()) text += ", ";
    text += std::to_string(value);
  }
  return text;
}

}  // namespace

CUtensorMap make_tensor_map(const char* what, DType dtype, const void* data, std::span<const std::int64_t> sizes,
                            std::span<const std::int64_t> strides, std::span<const int> box) {
  constexpr std::size_t kMaxRank = 5, kElement = 2;
  cuuint64_t all_sizes[kMaxRank]{}, bytes[kMaxRank]{};
  cuuint32_t box_sizes[kMaxRank]{}, steps[kMaxRank];
  std::fill(std::begin(steps), std::end(steps), 1U);
  DELTAIC_CHECK(sizes.size() <= kMaxRank && box.size() == sizes.size() && strides.size() + 1 == sizes.size(), what,
                ": a tensor map of ", sizes.size(), " sizes, ", strides.size(), " strides and a box of ", box.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    all_sizes[i] = static_cast<cuuint64_t>(sizes[i]);
    box_sizes[i] = static_cast<cuuint32_t>(box[i]);
    if (i < strides.size()) bytes[i] = static_cast<cuuint64_t>(strides[i]) * kElement;
  }
  CUtensorMap map;
  const CUresult result = encode_tensor_map()(
      &map, dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(data), all_sizes, bytes, box_sizes, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  DELTAIC_CHECK(result == CUDA_SUCCESS, what, ": cuTensorMapEncodeTiled returned ", static_cast<int>(result),
                " for sizes ", list(sizes), " with strides of ", list(strides), " elements");
  return map;
}

}  // namespace deltaic::cuda

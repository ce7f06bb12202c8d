#include <deltaic/tensor.h>

#include "cpp/src/check.h"

namespace deltaic {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i8:
    case DType::u8:
      return 1;
  }
  return 0;
}

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i8:
      return "i8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

std::int64_t TensorView::numel() const {
  std::int64_t count = 1;
  for (int i = 0; i < rank; ++i) count *= shape[i];
  return count;
}

bool TensorView::is_contiguous() const {
  std::int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

TensorView TensorView::slice(std::int64_t begin, std::int64_t end) const {
  DELTAIC_CHECK(rank > 0 && 0 <= begin && begin <= end && end <= shape[0], "slice [", begin, ", ", end,
                ") of a tensor with ", rank > 0 ? shape[0] : 0, " rows");
  TensorView result = *this;
  result.data = static_cast<char*>(data) + begin * stride[0] * static_cast<std::int64_t>(size_of(dtype));
  result.shape[0] = end - begin;
  return result;
}

TensorView TensorView::reshape(std::span<const std::int64_t> new_shape) const {
  DELTAIC_CHECK(is_contiguous(), "reshape needs a contiguous tensor");
  TensorView result = make_view(data, dtype, new_shape, device);
  DELTAIC_CHECK(result.numel() == numel(), "reshape from ", numel(), " to ", result.numel(), " elements");
  return result;
}

TensorView make_view(void* data, DType dtype, std::span<const std::int64_t> shape, Device device) {
  DELTAIC_CHECK(shape.size() <= kMaxRank, "a tensor of rank ", shape.size(), ", the largest is ", kMaxRank);
  TensorView view{.data = data, .dtype = dtype, .device = device, .rank = static_cast<int>(shape.size())};
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    DELTAIC_CHECK(shape[i] >= 0, "a tensor with size ", shape[i], " in dimension ", i);
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    DELTAIC_CHECK(!__builtin_mul_overflow(stride, shape[i], &stride), "a tensor of more than 2^63 elements");
  }
  return view;
}

void check_element_access(DType dtype, std::size_t element_bytes, bool is_float) {
  const bool dtype_is_float = dtype == DType::f32 || dtype == DType::f64;
  DELTAIC_CHECK(size_of(dtype) == element_bytes && dtype_is_float == is_float, "a tensor of dtype ", name(dtype),
                " is read as ", element_bytes, "-byte ", is_float ? "floats" : "integers");
}

}  // namespace deltaic

#include "cpp/src/ops/checks.h"

#include <algorithm>

namespace deltaic::ops {
namespace {

const char* name_of(DeviceType type) { return type == DeviceType::cpu ? "cpu" : "cuda"; }

std::string shape_text(const std::int64_t* shape, std::size_t rank) {
  std::string text = "[";
  for (std::size_t i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += shape[i] == kAnySize ? "any" : std::to_string(shape[i]);
  }
  return text + "]";
}

std::string dtype_text(std::initializer_list<DType> dtypes) {
  std::string text;
  for (const DType dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += name(dtype);
  }
  return text;
}

}  // namespace

void check_tensor(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape) {
  DELTAIC_CHECK(std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end(), op, ": ", name, " is ",
                deltaic::name(tensor.dtype), ", expected ", dtype_text(dtypes));
  bool fits = tensor.rank == static_cast<int>(shape.size());
  for (std::size_t i = 0; fits && i < shape.size(); ++i)
    fits = shape.begin()[i] == kAnySize || shape.begin()[i] == tensor.shape[i];
  DELTAIC_CHECK(fits, op, ": ", name, " has shape ", shape_text(tensor.shape.data(), tensor.rank), ", expected ",
                shape_text(shape.begin(), shape.size()));
  DELTAIC_CHECK(tensor.device == ctx.device, op, ": ", name, " is on ", name_of(tensor.device.type), ":",
                tensor.device.index, ", the op runs on ", name_of(ctx.device.type), ":", ctx.device.index);
  const int last = tensor.rank - 1;
  DELTAIC_CHECK(last < 0 || tensor.shape[last] <= 1 || tensor.stride[last] == 1, op, ": the last dimension of ", name,
                " has stride ", last < 0 ? 0 : tensor.stride[last], ", it must be contiguous");
  DELTAIC_CHECK(tensor.data != nullptr || tensor.numel() == 0, op, ": ", name, " has no memory");
}

void check_contiguous(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                      std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape) {
  check_tensor(op, name, tensor, ctx, dtypes, shape);
  DELTAIC_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
}

ThreadPool& threads_of(const char* op, const Context& ctx) {
  DELTAIC_CHECK(ctx.threads != nullptr, op, ": a CPU context needs a thread pool");
  return *ctx.threads;
}

std::initializer_list<DType> float_types(const Context& ctx) {
  static constexpr std::initializer_list<DType> kCpu = {DType::f32}, kCuda = {DType::f32, DType::f16, DType::bf16};
  return ctx.device.type == DeviceType::cpu ? kCpu : kCuda;
}

}  // namespace deltaic::ops

#pragma once

#include <cstdint>
#include <initializer_list>

#include "cpp/src/check.h"
#include "cpp/src/ops/context.h"

namespace deltaic::ops {

inline constexpr std::int64_t kAnySize = -1;

// Checks dtype, device and shape of an op's tensor (kAnySize: any) and that its last dimension is contiguous. Throws
// InvalidArgument naming the op, the tensor, what was wanted and what came.
void check_tensor(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape);
// The same for a tensor without gaps.
void check_contiguous(const char* op, const char* name, const TensorView& tensor, const Context& ctx,
                      std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> shape);

// The dtypes of activations: f32 on the CPU; f32, f16 and bf16 on CUDA.
std::initializer_list<DType> float_types(const Context& ctx);

// The pool of a CPU context. Throws InvalidArgument when there is none.
ThreadPool& threads_of(const char* op, const Context& ctx);

}  // namespace deltaic::ops

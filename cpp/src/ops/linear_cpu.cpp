#include <algorithm>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/linear.h"

namespace deltaic::cpu {
namespace {

// Up to so many rows of x, W is read from memory about once: the longer a task's stretch of it, the better it streams.
constexpr std::int64_t kFewTokens = 32;
constexpr std::int64_t kStreamBytes = 256 * 1024;
// With more, the rows of W a task that L2 holds, and the rows of x when W alone does not keep the threads busy.
constexpr std::int64_t kWeightRows = 64, kInputRows = 48;
constexpr std::int64_t kFewestWeightRows = 16;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

void linear(ThreadPool& threads, TensorView x, const ops::Weight& weight, const ops::LinearOptions& options,
            TensorView y) {
  const Kernels& kernel = kernels();
  const TensorView& w = weight.view;
  const std::int64_t num_tokens = x.shape[0], num_rows = w.shape[0];
  const std::int64_t row_bytes = w.stride[0] * static_cast<std::int64_t>(size_of(w.dtype));
  std::int64_t rows = kWeightRows, tokens = num_tokens;
  if (num_tokens <= kFewTokens) {
    const std::int64_t share = ceil_div(num_rows, 2 * threads.num_threads());
    rows = std::max(kFewestWeightRows,
                    std::min(ceil_div(share, 4) * 4, kStreamBytes / std::max<std::int64_t>(row_bytes, 1)));
  } else if (ceil_div(num_rows, rows) < 4 * threads.num_threads()) {
    rows = kFewestWeightRows;
    tokens = std::min(num_tokens, kInputRows);
  }
  const std::int64_t row_tasks = ceil_div(num_rows, rows), token_tasks = ceil_div(num_tokens, tokens);
  threads.parallel_for(row_tasks * token_tasks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t row = task / token_tasks * rows, token = task % token_tasks * tokens;
      kernel.linear({.x = x.as<float>() + token * x.stride[0],
                     .x_stride = x.stride[0],
                     .x_rows = nullptr,
                     .m = std::min(tokens, num_tokens - token),
                     .w = static_cast<const char*>(w.data) + row * row_bytes,
                     .w_stride = w.stride[0],
                     .w_type = float_type(w.dtype),
                     .n = std::min(rows, num_rows - row),
                     .k = w.shape[1],
                     .bias = options.bias.data != nullptr ? options.bias.as<float>() + row : nullptr,
                     .accumulate = options.accumulate,
                     .y = y.as<float>() + token * y.stride[0] + row,
                     .y_stride = y.stride[0]});
    }
  });
}

}  // namespace deltaic::cpu

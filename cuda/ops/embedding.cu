// y[t, :] = table[ids[t], :]: a block a token; bound by memory.
#include "cpp/src/ops/embedding.h"

#include "cpp/src/check.h"
#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kThreads = 256;

template <class Table, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const std::int32_t* ids, const Table* table, std::int64_t table_stride, std::int64_t vocab_size,
                     std::int64_t size, T* y, std::int64_t y_stride) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t token = blockIdx.x;
  std::int64_t id = ids[token];
  if (id < 0 || id >= vocab_size) id = 0;
  const Table* row = table + id * table_stride;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) y[token * y_stride + i] = from_float<T>(to_float(row[i]));
}

}  // namespace

void embedding(ops::Stream stream, TensorView ids, const ops::Weight& table, TensorView y) {
  visit_float(table.view.dtype, [&]<class Table>(Table) {
    visit_float(y.dtype, [&]<class T>(T) {
      const DependentLaunch launch{
          .grid = dim3(static_cast<unsigned>(ids.shape[0])), .block = dim3(kThreads), .stream = native(stream)};
      launch(embedding_kernel<Table, T>, static_cast<const std::int32_t*>(ids.data),
             static_cast<const Table*>(table.view.data), table.view.stride[0], table.view.shape[0], table.view.shape[1],
             static_cast<T*>(y.data), y.stride[0]);
    });
  });
}

}  // namespace deltaic::cuda

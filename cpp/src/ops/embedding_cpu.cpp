#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"

namespace deltaic::cpu {

void embedding(ThreadPool& threads, TensorView ids, const ops::Weight& table, TensorView y) {
  const Kernels& kernel = kernels();
  const TensorView& rows = table.view;
  const Float type = float_type(rows.dtype);
  const std::int64_t size = rows.shape[1], row_bytes = rows.stride[0] * static_cast<std::int64_t>(size_of(rows.dtype));
  threads.parallel_for(ids.shape[0], grain_of(size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t id = ids.as<std::int32_t>()[t];
      DELTAIC_CHECK(0 <= id && id < rows.shape[0], "embedding: token id ", id, ", the table has ", rows.shape[0],
                    " rows");
      kernel.widen(type, static_cast<const char*>(rows.data) + id * row_bytes, size, y.as<float>() + t * y.stride[0]);
    }
  });
}

}  // namespace deltaic::cpu

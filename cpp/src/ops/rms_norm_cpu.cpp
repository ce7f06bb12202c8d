#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic::cpu {

void rms_norm(ThreadPool& threads, TensorView x, TensorView weight, float eps, TensorView y) {
  const Kernels& kernel = kernels();
  const std::int64_t size = x.shape[1];
  threads.parallel_for(x.shape[0], grain_of(size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      kernel.rms_norm(x.as<float>() + t * x.stride[0], weight.as<float>(), eps, size, y.as<float>() + t * y.stride[0]);
  });
}

void gated_rms_norm(ThreadPool& threads, TensorView x, TensorView z, TensorView weight, float eps, TensorView y) {
  const Kernels& kernel = kernels();
  const std::int64_t num_heads = x.shape[1], dim = x.shape[2];
  threads.parallel_for(x.shape[0] * num_heads, grain_of(dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t t = i / num_heads, h = i % num_heads;
      kernel.gated_rms_norm(x.as<float>() + t * x.stride[0] + h * x.stride[1],
                            z.as<float>() + t * z.stride[0] + h * z.stride[1], weight.as<float>(), eps, dim,
                            y.as<float>() + t * y.stride[0] + h * y.stride[1]);
    }
  });
}

}  // namespace deltaic::cpu

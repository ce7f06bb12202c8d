#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"

namespace deltaic::cpu {

void silu_mul(ThreadPool& threads, TensorView gate, TensorView up, TensorView y) {
  const Kernels& kernel = kernels();
  const std::int64_t size = gate.shape[1];
  threads.parallel_for(gate.shape[0], grain_of(4 * size), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      kernel.silu_mul(gate.as<float>() + t * gate.stride[0], up.as<float>() + t * up.stride[0], size,
                      y.as<float>() + t * y.stride[0]);
  });
}

void sigmoid_mul(ThreadPool& threads, TensorView gate, TensorView x) {
  const Kernels& kernel = kernels();
  const std::int64_t num_heads = x.shape[1], dim = x.shape[2];
  threads.parallel_for(x.shape[0] * num_heads, grain_of(4 * dim), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      kernel.sigmoid_mul(gate.as<float>() + i / num_heads * gate.stride[0] + i % num_heads * gate.stride[1], dim,
                         x.as<float>() + i * dim);
  });
}

}  // namespace deltaic::cpu

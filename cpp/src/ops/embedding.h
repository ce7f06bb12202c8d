#pragma once

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

namespace ops {
// y[t, :] = table[ids[t], :].
//   ids    [num_tokens] i32, each in [0, vocab_size): the caller has checked them; on CUDA another id reads row 0
//   table  [vocab_size, hidden_size] f32 | f16 | bf16
//   y      [num_tokens, hidden_size] f32 (CPU); f32 | f16 | bf16 (CUDA)
void embedding(const Context& ctx, TensorView ids, const Weight& table, TensorView y);
}  // namespace ops

namespace cpu {
void embedding(ThreadPool& threads, TensorView ids, const ops::Weight& table, TensorView y);
}
namespace cuda {
void embedding(ops::Stream stream, TensorView ids, const ops::Weight& table, TensorView y);
}

}  // namespace deltaic

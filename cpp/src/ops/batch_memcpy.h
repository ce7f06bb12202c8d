#pragma once

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {
// memmove(dst_ptrs[i], src_ptrs[i], sizes[i]) for every i, overlap within one copy allowed in both directions; no two
// copies may touch the same destination byte, and no copy may write what another reads.
//   src_ptrs, dst_ptrs  [n] i64 holding the bits of 64-bit addresses, on ctx.device
//   sizes               [n] i32 or i64 bytes, >= 0
// n may be 0: nothing is launched.
void batch_memcpy(const Context& ctx, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes);
}  // namespace ops

namespace cpu {
void batch_memcpy(ThreadPool& threads, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes);
}
namespace cuda {
void batch_memcpy(ops::Stream stream, TensorView src_ptrs, TensorView dst_ptrs, TensorView sizes);
}

}  // namespace deltaic

#pragma once

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {

struct PagedAttentionArgs {
  TensorView q;                // [num_tokens, num_heads, head_dim], any token and head stride, dim contiguous
  TensorView k_cache;          // [num_blocks, block_size, num_kv_heads, head_dim] f32 | f16 | bf16, any block stride
  TensorView v_cache;          // [num_blocks, block_size, num_kv_heads, head_dim]
  TensorView block_table;      // [num_reqs, row_stride] i32; nothing past ceil(seq_len / block_size) is read
  TensorView seq_lens;         // [num_reqs] i32: tokens attended to, the new ones included
  TensorView query_start_loc;  // [num_reqs + 1] i32; a request with no tokens is skipped
  float scale = 0.0F;          // head_dim^-0.5
  TensorView out;              // [num_tokens, num_heads, head_dim], contiguous
};
// out = softmax(scale q k^T, causal) v. Query j of request i has position seq_lens[i] - query_len_i + j and sees keys
// 0 ... position. Query head h uses key/value head h / (num_heads / num_kv_heads). Softmax and sums in f32, in an order
// that depends on absolute key positions only: a token gives the same bits alone, batched or chunked. Cache slots
// past the visible keys are never read, so what they hold (NaN) does not matter.
void paged_attention(const Context& ctx, const PagedAttentionArgs& args);

}  // namespace ops

namespace cpu {
void paged_attention(ThreadPool& threads, const ops::PagedAttentionArgs& args);
}

}  // namespace deltaic

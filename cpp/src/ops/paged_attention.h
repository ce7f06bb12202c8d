#pragma once

#include <cstddef>
#include <cstdint>

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
  TensorView gate{};           // none, or [num_tokens, num_heads, head_dim] as q: out is multiplied by sigmoid(gate)
  TensorView out;              // [num_tokens, num_heads, head_dim], contiguous

  // What the host knows of the lengths; CUDA chooses kernels and grids by it and reads no length back. The first
  // num_decodes requests have 0 to max_decode_query_len query tokens and run in the decode kernel, which splits the
  // keys of a request over blocks; it is made for at most kMaxDecodeRows query rows a key/value head, and right for any
  // number. The others run in the prefill kernel. In a captured graph these are the limits of all replays.
  int num_decodes = 0;
  int max_decode_query_len = 1;
  int max_query_len = 0;   // of the requests after the decodes; 0: unknown, num_tokens is taken
  int max_seq_len = 0;     // of all requests; 0: unknown, what a row of the block table holds is taken
  TensorView workspace{};  // CUDA with num_decodes > 0: u8, paged_attention_workspace_bytes of the limits or more
};
// out = softmax(scale q k^T, causal) v. Query j of request i has position seq_lens[i] - query_len_i + j and sees keys
// 0 ... position. Query head h uses key/value head h / (num_heads / num_kv_heads). Softmax and sums in f32. Cache slots
// past seq_lens[i] do not matter, whatever they hold (NaN).
// CPU: f32 q; the order of sums depends on absolute key positions only: a token gives the same bits alone, batched or
// chunked. CUDA: q, gate and out are f32, f16 or bf16 of one dtype. The order of sums depends on the kernel, and in
// the decode kernel on the request's own seq_len: a request gives the same bits whatever else is in the batch, and a
// prompt the same bits in any chunks that run in the prefill kernel. block_table, seq_lens, query_start_loc and the
// keys and values before the new tokens may be read while the previous kernel of the stream still runs: that kernel
// does not write them (the kernel before it may).
void paged_attention(const Context& ctx, const PagedAttentionArgs& args);

// Query rows (query tokens times heads of a group) that share one read of keys and values in the decode kernel.
inline constexpr int kMaxDecodeRows = 16;

// Bytes of scratch for the partial sums of up to num_decodes requests with max_decode_query_len query tokens and
// max_seq_len keys each: f32 [num_decodes, splits, max_decode_query_len, num_heads, head_dim + 2].
std::size_t paged_attention_workspace_bytes(std::int64_t num_decodes, std::int64_t max_decode_query_len,
                                            std::int64_t max_seq_len, std::int64_t num_heads, std::int64_t head_dim);

}  // namespace ops

namespace cpu {
void paged_attention(ThreadPool& threads, const ops::PagedAttentionArgs& args);
}
namespace cuda {
void paged_attention(ops::Stream stream, const ops::PagedAttentionArgs& args);
}

}  // namespace deltaic

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cpp/src/ops/paged_attention.h"

namespace deltaic::cuda {

// Rows of [token, head, dim] with contiguous dims; strides in elements.
template <class Pointer>
struct HeadRows {
  Pointer data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
};

// A span of requests as the attention kernels see it. Element types are the kernels' template parameters.
struct AttentionParams {
  HeadRows<const void*> q, gate;  // gate.data may be null
  HeadRows<void*> out;
  const std::int32_t* block_table;
  std::int64_t table_stride;
  const std::int32_t *seq_lens, *query_start_loc;
  int num_reqs, num_tokens;
  int num_kv_heads, group, head_dim, block_size;
  int max_query_len, max_seq_len;
  float scale;
};

// Keys and values as boxes of kBoxKeys keys of a block and kBoxDims channels of a head, swizzled by 128 bytes.
inline constexpr int kBoxKeys = 16, kBoxDims = 64;
inline constexpr int kBoxBytes = kBoxKeys * kBoxDims * 2;
struct KvMaps {
  CUtensorMap k, v;
};

// Any dtype and head_dim: one block a query row.
void attention_generic(cudaStream_t stream, const AttentionParams& params, DType dtype, const TensorView& k_cache,
                       const TensorView& v_cache);
// f16 and bf16 with caches of that dtype and has_fast_head_dim(head_dim); partial: see paged_attention_workspace_bytes.
void attention_decode(cudaStream_t stream, const AttentionParams& params, DType dtype, const KvMaps& maps,
                      float* partial);
void attention_prefill(cudaStream_t stream, const AttentionParams& params, DType dtype, const KvMaps& maps);

inline bool has_fast_head_dim(std::int64_t head_dim) { return head_dim == 64 || head_dim == 128 || head_dim == 256; }

}  // namespace deltaic::cuda

#pragma once

#include <cmath>
#include <cstdint>

#include "cpp/src/ops/attention_splits.h"
#include "cuda/attention/attention_params.h"

namespace deltaic::cuda {

// What the decode kernel leaves to the kernel that combines splits.
struct DecodeParams {
  AttentionParams base;
  int num_row_tiles, max_splits;
  float *partial, *stats;  // [num_reqs, max_splits, num_kv_heads, max_query_len * group, head_dim]; [..., 2]: max, sum

  __device__ std::int64_t partial_row(int request, int split, int kv_head, int row) const {
    const std::int64_t head = (std::int64_t{request} * max_splits + split) * base.num_kv_heads + kv_head;
    return head * base.max_query_len * base.group + row;
  }
  // Splits of a request; 0 for one without query tokens.
  __device__ int num_splits(int request) const {
    if (base.query_start_loc[request + 1] == base.query_start_loc[request]) return 0;
    return ops::num_splits(base.seq_lens[request]);
  }
};

// Writes out for the requests that have more than one split.
void combine_splits(cudaStream_t stream, const DecodeParams& params, DType dtype);

}  // namespace deltaic::cuda

// Chooses the attention kernels: tensor cores where dtype, sizes and alignment allow it, the generic kernel elsewhere.
#include "cpp/src/ops/paged_attention.h"

#include <algorithm>

#include "cpp/src/check.h"
#include "cuda/attention/attention_params.h"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/tensor_map.h"

namespace deltaic::cuda {
namespace {

bool rows_are_aligned(const TensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] % 8 == 0 && view.stride[1] % 8 == 0;
}

// Whether the copy engine and 16-byte loads can read everything, and the chip has wgmma.
bool fits_tensor_cores(const ops::PagedAttentionArgs& args) {
  const auto is_aligned_cache = [](const TensorView& cache) {
    return rows_are_aligned(cache) && cache.stride[2] % 8 == 0 && cache.shape[1] % kBoxKeys == 0;
  };
  return args.q.dtype != DType::f32 && args.k_cache.dtype == args.q.dtype && args.v_cache.dtype == args.q.dtype &&
         has_fast_head_dim(args.q.shape[2]) && rows_are_aligned(args.q) &&
         (args.gate.data == nullptr || rows_are_aligned(args.gate)) && rows_are_aligned(args.out) &&
         is_aligned_cache(args.k_cache) && is_aligned_cache(args.v_cache) && is_hopper(args.q.device.index);
}

CUtensorMap boxes_of(const TensorView& cache) {
  const std::int64_t sizes[] = {cache.shape[3], cache.shape[2], cache.shape[1], cache.shape[0]};
  const std::int64_t strides[] = {cache.stride[2], cache.stride[1], cache.stride[0]};
  const int box[] = {kBoxDims, 1, kBoxKeys, 1};
  return make_tensor_map("paged_attention", cache.dtype, cache.data, sizes, strides, box);
}

AttentionParams params_of(const ops::PagedAttentionArgs& args) {
  const auto num_tokens = static_cast<int>(args.q.shape[0]);
  const auto most_keys = static_cast<int>(args.block_table.shape[1] * args.k_cache.shape[1]);
  return {.q = {args.q.data, args.q.stride[0], args.q.stride[1]},
          .gate = {args.gate.data, args.gate.stride[0], args.gate.stride[1]},
          .out = {args.out.data, args.out.stride[0], args.out.stride[1]},
          .block_table = args.block_table.as<std::int32_t>(),
          .table_stride = args.block_table.stride[0],
          .seq_lens = args.seq_lens.as<std::int32_t>(),
          .query_start_loc = args.query_start_loc.as<std::int32_t>(),
          .num_reqs = static_cast<int>(args.block_table.shape[0]),
          .num_tokens = num_tokens,
          .num_kv_heads = static_cast<int>(args.k_cache.shape[2]),
          .group = static_cast<int>(args.q.shape[1] / args.k_cache.shape[2]),
          .head_dim = static_cast<int>(args.q.shape[2]),
          .block_size = static_cast<int>(args.k_cache.shape[1]),
          .max_query_len = args.max_query_len > 0 ? std::min(args.max_query_len, num_tokens) : num_tokens,
          .max_seq_len = args.max_seq_len > 0 ? std::min(args.max_seq_len, most_keys) : most_keys,
          .scale = args.scale};
}

}  // namespace

void paged_attention(ops::Stream stream, const ops::PagedAttentionArgs& args) {
  const DeviceGuard guard(args.q.device.index);
  const AttentionParams all = params_of(args);
  if (!fits_tensor_cores(args)) return attention_generic(native(stream), all, args.q.dtype, args.k_cache, args.v_cache);
  const KvMaps maps{boxes_of(args.k_cache), boxes_of(args.v_cache)};
  if (args.num_decodes > 0) {
    AttentionParams decodes = all;
    decodes.num_reqs = args.num_decodes;
    decodes.max_query_len = args.max_decode_query_len;
    attention_decode(native(stream), decodes, args.q.dtype, maps, static_cast<float*>(args.workspace.data));
  }
  if (args.num_decodes < all.num_reqs) {
    AttentionParams prefills = all;
    prefills.num_reqs -= args.num_decodes;
    prefills.block_table += args.num_decodes * prefills.table_stride;
    prefills.seq_lens += args.num_decodes;
    prefills.query_start_loc += args.num_decodes;
    attention_prefill(native(stream), prefills, args.q.dtype, maps);
  }
}

}  // namespace deltaic::cuda

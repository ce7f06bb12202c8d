#include "cpp/src/ops/paged_attention.h"

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {

void paged_attention(const Context& ctx, const PagedAttentionArgs& args) {
  const char* op = "paged_attention";
  if (ctx.device.type != DeviceType::cpu) throw_unsupported(op, ctx);
  check_tensor(op, "q", args.q, ctx, {DType::f32}, {kAnySize, kAnySize, kAnySize});
  const std::int64_t num_heads = args.q.shape[1], head_dim = args.q.shape[2];
  check_tensor(op, "k_cache", args.k_cache, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, kAnySize, kAnySize, head_dim});
  check_tensor(op, "v_cache", args.v_cache, ctx, {DType::f32, DType::f16, DType::bf16},
               {args.k_cache.shape[0], args.k_cache.shape[1], args.k_cache.shape[2], head_dim});
  check_tensor(op, "block_table", args.block_table, ctx, {DType::i32}, {kAnySize, kAnySize});
  const std::int64_t num_reqs = args.block_table.shape[0], num_kv_heads = args.k_cache.shape[2];
  check_contiguous(op, "seq_lens", args.seq_lens, ctx, {DType::i32}, {num_reqs});
  check_contiguous(op, "query_start_loc", args.query_start_loc, ctx, {DType::i32}, {num_reqs + 1});
  check_contiguous(op, "out", args.out, ctx, {DType::f32}, {args.q.shape[0], num_heads, head_dim});
  DELTAIC_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, op, ": ", num_heads,
                " query heads do not divide into ", num_kv_heads, " key/value heads");
  if (args.q.numel() == 0 || num_reqs == 0) return;
  cpu::paged_attention(threads_of(op, ctx), args);
}

}  // namespace deltaic::ops

#include "cpp/src/ops/paged_attention.h"

#include "cpp/src/ops/attention_splits.h"
#include "cpp/src/ops/checks.h"

namespace deltaic::ops {
namespace {

constexpr const char* kOp = "paged_attention";

void check_lengths(const Context& ctx, const PagedAttentionArgs& args) {
  const std::int64_t num_reqs = args.block_table.shape[0];
  DELTAIC_CHECK(0 <= args.num_decodes && args.num_decodes <= num_reqs, kOp, ": num_decodes is ", args.num_decodes,
                " of ", num_reqs, " requests");
  DELTAIC_CHECK(args.max_decode_query_len > 0, kOp, ": max_decode_query_len is ", args.max_decode_query_len,
                ", it must be positive");
  DELTAIC_CHECK(args.max_query_len >= 0 && args.max_seq_len >= 0, kOp, ": max_query_len is ", args.max_query_len,
                " and max_seq_len ", args.max_seq_len, ", they must not be negative");
  if (ctx.device.type != DeviceType::cuda || args.num_decodes == 0) return;
  const std::int64_t most = args.block_table.shape[1] * args.k_cache.shape[1];
  const std::size_t needed =
      paged_attention_workspace_bytes(args.num_decodes, args.max_decode_query_len,
                                      args.max_seq_len > 0 ? args.max_seq_len : most, args.q.shape[1], args.q.shape[2]);
  check_contiguous(kOp, "workspace", args.workspace, ctx, {DType::u8}, {kAnySize});
  DELTAIC_CHECK(args.workspace.num_bytes() >= needed, kOp, ": workspace has ", args.workspace.num_bytes(), " bytes, ",
                needed, " are needed for ", args.num_decodes, " decodes");
}

}  // namespace

std::size_t paged_attention_workspace_bytes(std::int64_t num_decodes, std::int64_t max_decode_query_len,
                                            std::int64_t max_seq_len, std::int64_t num_heads, std::int64_t head_dim) {
  return static_cast<std::size_t>(num_decodes * max_splits(static_cast<int>(max_seq_len)) * max_decode_query_len *
                                  num_heads * (head_dim + 2)) *
         sizeof(float);
}

void paged_attention(const Context& ctx, const PagedAttentionArgs& args) {
  const auto check_float = [&](const char* field, const TensorView& tensor, std::initializer_list<std::int64_t> shape) {
    if (ctx.device.type == DeviceType::cpu) return check_tensor(kOp, field, tensor, ctx, {DType::f32}, shape);
    check_tensor(kOp, field, tensor, ctx, {DType::f32, DType::f16, DType::bf16}, shape);
    DELTAIC_CHECK(tensor.dtype == args.q.dtype, kOp, ": ", field, " is ", name(tensor.dtype), ", q is ",
                  name(args.q.dtype));
  };
  check_float("q", args.q, {kAnySize, kAnySize, kAnySize});
  const std::int64_t num_heads = args.q.shape[1], head_dim = args.q.shape[2];
  check_tensor(kOp, "k_cache", args.k_cache, ctx, {DType::f32, DType::f16, DType::bf16},
               {kAnySize, kAnySize, kAnySize, head_dim});
  check_tensor(kOp, "v_cache", args.v_cache, ctx, {DType::f32, DType::f16, DType::bf16},
               {args.k_cache.shape[0], args.k_cache.shape[1], args.k_cache.shape[2], head_dim});
  check_tensor(kOp, "block_table", args.block_table, ctx, {DType::i32}, {kAnySize, kAnySize});
  const std::int64_t num_reqs = args.block_table.shape[0], num_kv_heads = args.k_cache.shape[2];
  check_contiguous(kOp, "seq_lens", args.seq_lens, ctx, {DType::i32}, {num_reqs});
  check_contiguous(kOp, "query_start_loc", args.query_start_loc, ctx, {DType::i32}, {num_reqs + 1});
  check_float("out", args.out, {args.q.shape[0], num_heads, head_dim});
  DELTAIC_CHECK(args.out.is_contiguous(), kOp, ": out must be contiguous");
  if (args.gate.data != nullptr) check_float("gate", args.gate, {args.q.shape[0], num_heads, head_dim});
  DELTAIC_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, kOp, ": ", num_heads,
                " query heads do not divide into ", num_kv_heads, " key/value heads");
  check_lengths(ctx, args);
  if (args.q.numel() == 0 || num_reqs == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::paged_attention(threads_of(kOp, ctx), args);
    case DeviceType::cuda:
      return cuda::paged_attention(ctx.stream, args);
  }
}

}  // namespace deltaic::ops

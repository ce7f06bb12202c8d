#pragma once

#include <vector>

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/rms_norm.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

namespace ops {

// Softmax over all experts in f32, then the k largest (ties: the lower id), renormalised when asked.
//   logits       [num_tokens, num_experts] f32
//   expert_ids   [num_tokens, k] i32, best first
//   weights      [num_tokens, k] f32
//   shared_logits  none, or [num_tokens, 1] f32: the shared expert is then the last of expert_ids and weights, of k + 1
//                  columns: its id is num_experts, its weight sigmoid(shared_logits[t])
void moe_router(const Context& ctx, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights);
inline void moe_router(const Context& ctx, TensorView logits, bool renormalize, TensorView expert_ids,
                       TensorView weights) {
  moe_router(ctx, logits, {}, renormalize, expert_ids, weights);
}

// The norm, the router's product and moe_router in one kernel, only where moe_route_fits() says so: on CUDA, for few
// tokens of f16 or bf16. A token's result does not depend on the others.
//   x          [num_tokens, hidden]
//   router     [>= num_experts, hidden]; with a shared expert row num_experts is its gate; more rows are not read
//   expert_ids, weights  as for moe_router
bool moe_route_fits(const Context& ctx, TensorView x, const Weight& router, std::int64_t num_experts);
void moe_route(const Context& ctx, TensorView x, const FusedNorm& norm, const Weight& router, std::int64_t num_experts,
               bool has_shared_expert, bool renormalize, TensorView expert_ids, TensorView weights);

struct ExpertWeights {
  std::vector<Weight> gate, up;  // [num_experts] of [intermediate, hidden]
  std::vector<Weight> down;      // [num_experts] of [hidden, intermediate]
  // On CUDA instead, all experts in one tensor, contiguous:
  Weight all_gate_up;  // [num_experts, 2 * intermediate, hidden]: an expert's gate rows, then its up rows
  Weight all_down;     // [num_experts, hidden, intermediate]
};

// y[t, :] += sum over j of weights[t, j] * SwiGLU_{expert_ids[t, j]}(x[t, :]), summed in the order j = 0, 1, ...
//   x, y     [num_tokens, hidden] f32 (CPU); one of f32 | f16 | bf16 (CUDA), the dtype of the weights there; rows
//            contiguous
// On CUDA an id outside [0, num_experts) adds nothing, the ids of a token differ, and what an expert gives may be
// rounded to the dtype of x before it is summed. x must not be written by the kernel just before.
//   scratch  at least moe_scratch_bytes(...) bytes, of the same device
//   norm     only where moe_experts_fuses_norm() says so: the experts read rms_norm(x)
void moe_experts(const Context& ctx, TensorView x, const ExpertWeights& experts, TensorView expert_ids,
                 TensorView weights, TensorView scratch, TensorView y, const FusedNorm& norm = {});
// Whether moe_experts takes a norm for this x with so many experts a token: on CUDA, for few tokens of f16 or bf16.
bool moe_experts_fuses_norm(const Context& ctx, TensorView x, const ExpertWeights& experts,
                            std::int64_t num_experts_per_token);
std::size_t moe_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t hidden,
                              std::int64_t intermediate);  // on the CPU
std::size_t moe_scratch_bytes(Device device, std::int64_t num_tokens, int num_experts_per_token,
                              std::int64_t num_experts, std::int64_t hidden, std::int64_t intermediate);

// y[t, :] += sigmoid(gate[t]) * x[t, :]   (the shared expert)
//   gate  [num_tokens, 1] dtype of x or f32; x, y [num_tokens, hidden] f32 (CPU); one of f32 | f16 | bf16 (CUDA)
void add_sigmoid_scaled(const Context& ctx, TensorView gate, TensorView x, TensorView y);

}  // namespace ops

namespace cpu {
void moe_router(ThreadPool& threads, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights);
void moe_experts(ThreadPool& threads, TensorView x, const ops::ExpertWeights& experts, TensorView expert_ids,
                 TensorView weights, TensorView scratch, TensorView y);
void add_sigmoid_scaled(ThreadPool& threads, TensorView gate, TensorView x, TensorView y);
}  // namespace cpu
namespace cuda {
bool moe_route_fits(TensorView x, const ops::Weight& router, std::int64_t num_experts);
void moe_route(ops::Stream stream, TensorView x, const ops::FusedNorm& norm, const ops::Weight& router,
               std::int64_t num_experts, bool has_shared_expert, bool renormalize, TensorView expert_ids,
               TensorView weights);
void moe_router(ops::Stream stream, TensorView logits, TensorView shared_logits, bool renormalize,
                TensorView expert_ids, TensorView weights);
bool moe_experts_fuses_norm(TensorView x, TensorView gate_up, TensorView down, std::int64_t num_experts_per_token);
void moe_experts(ops::Stream stream, TensorView x, const ops::FusedNorm& norm, TensorView gate_up, TensorView down,
                 TensorView expert_ids, TensorView weights, TensorView scratch, TensorView y);
std::size_t moe_scratch_bytes(std::int64_t num_tokens, int num_experts_per_token, std::int64_t num_experts,
                              std::int64_t hidden, std::int64_t intermediate);
void add_sigmoid_scaled(ops::Stream stream, TensorView gate, TensorView x, TensorView y);
}  // namespace cuda

}  // namespace deltaic

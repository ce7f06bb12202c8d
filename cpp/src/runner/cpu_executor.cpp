#include "cpp/src/runner/cpu_executor.h"

namespace deltaic {

namespace {

TensorView view_of(const std::vector<std::int32_t>& values) {
  return make_view(const_cast<std::int32_t*>(values.data()), DType::i32, {static_cast<std::int64_t>(values.size())});
}
TensorView view_of(const std::vector<std::int64_t>& values) {
  return make_view(const_cast<std::int64_t*>(values.data()), DType::i64, {static_cast<std::int64_t>(values.size())});
}
TensorView view_of(const std::vector<std::uint8_t>& values) {
  return make_view(const_cast<std::uint8_t*>(values.data()), DType::u8, {static_cast<std::int64_t>(values.size())});
}

}  // namespace

CpuExecutor::CpuExecutor(const ExecutorParts& parts)
    : parts_(parts),
      decoder_(parts.model, parts.weights, parts.ctx, decoder_limits(parts.options)),
      sampler_(parts.model.vocab_size, parts.options.max_num_reqs, parts.ctx),
      copier_(parts.caches.state()) {}

void CpuExecutor::forward(const StepPlan& plan) {
  copy_states(plan.copies_before);
  const StepInputs& inputs = plan.inputs;
  ForwardInputs step{
      .input_ids = view_of(inputs.input_token_ids),
      .positions = view_of(inputs.positions).reshape({1, inputs.query_start_loc.back()}),
      .query_start_loc = view_of(inputs.query_start_loc),
      .seq_lens = view_of(plan.attention.seq_lens),
      .block_table = parts_.planner.batch().block_table(parts_.groups.full_attn_group).view(plan.num_rows),
      .slot_mapping = view_of(plan.attention.slot_mapping),
      .gdn = {}};
  if (parts_.groups.gdn_group >= 0)
    step.gdn = {.query_start_loc = step.query_start_loc,
                .state_indices = view_of(plan.gdn.view.state_indices),
                .has_initial_state = view_of(plan.gdn.has_initial_state)};
  hidden_states_ = decoder_.forward(step, parts_.caches.views());
  copy_states(plan.copies_after);
}

void CpuExecutor::copy_states(std::span<const SlotCopy> copies) {
  for (const SlotCopy& copy : copies) copier_.add(copy.from, copy.to);
  copier_.run(parts_.ctx);
}

AsyncModelRunnerOutput CpuExecutor::sample(const StepPlan& plan) {
  return AsyncModelRunnerOutput(
      sampler_.sample(decoder_, hidden_states_, plan.inputs, plan.num_rows, parts_.planner.batch()));
}

}  // namespace deltaic

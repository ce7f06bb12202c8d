#include "cpp/src/runner/cpu_executor.h"

#include <cstring>
#include <utility>

#include "cpp/src/check.h"

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
      sampler_(parts.model.vocab_size, parts.options.max_num_reqs * (1 + parts.options.num_speculative_tokens),
               parts.ctx),
      copier_(parts.caches.state()) {
  if (parts.mtp_weights != nullptr)
    drafter_.emplace(parts.model, parts.mtp_weights, parts.ctx, parts.options, parts.caches.draft(),
                     parts.groups.block_size());
}

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
  if (parts_.groups.gdn_group >= 0 && parts_.options.num_speculative_tokens > 0) {
    step.gdn.num_decodes = plan.num_decodes;
    step.gdn.num_accepted = view_of(plan.gdn.view.num_accepted_tokens);
    step.gdn.num_draft_tokens = parts_.options.num_speculative_tokens;
    step.gdn.snapshot_slots = view_of(plan.gdn.snapshot_slots);
    step.gdn.snapshot_offsets = view_of(plan.gdn.snapshot_offsets);
  }
  HybridDecoder::Observer observer;
  if (hook_ != nullptr) {
    show_step(plan);
    hook_->before_forward(view_);
    step.inputs_embeds = view_.inputs_embeds;
    if (view_.layer_hidden.data != nullptr)
      observer = [this, layer = hook_->hidden_layer()](int index, const TensorView& hidden) {
        if (index == layer) std::memcpy(view_.layer_hidden.data, hidden.data, hidden.num_bytes());
      };
  }
  hidden_states_ = decoder_.forward(step, parts_.caches.views(), observer);
  if (hook_ != nullptr) {
    view_.hidden = hidden_states_;
    hook_->after_forward(view_);
  }
  copy_states(plan.copies_after);
}

void CpuExecutor::copy_states(std::span<const SlotCopy> copies) {
  for (const SlotCopy& copy : copies) copier_.add(copy.from, copy.to);
  copier_.run(parts_.ctx);
}

AsyncModelRunnerOutput CpuExecutor::sample(const StepPlan& plan) {
  InputBatch& batch = parts_.planner.batch();
  ModelRunnerOutput output = sampler_.sample(decoder_, hidden_states_, plan.inputs, plan.num_rows, batch);
  if (drafter_) drafter_->run(plan, hidden_states_, batch.block_table(parts_.groups.full_attn_group), batch, output);
  if (hook_ != nullptr) {
    std::vector<std::int32_t> token_ids;
    for (const auto& sampled : output.sampled_token_ids) token_ids.push_back(sampled.empty() ? -1 : sampled.back());
    hook_->after_sample(view_, token_ids);
  }
  return AsyncModelRunnerOutput(std::move(output));
}

void CpuExecutor::set_hook(std::shared_ptr<StepHook> hook) {
  const std::int64_t num_tokens = parts_.options.max_num_batched_tokens, hidden_size = parts_.model.hidden_size;
  if (hook != nullptr && parts_.options.num_speculative_tokens > 0)
    throw Unsupported(detail::concat("a step hook sees one token a request, num_speculative_tokens is ",
                                     parts_.options.num_speculative_tokens, ": use 0"));
  if (hook != nullptr) {
    const int layer = hook->hidden_layer(), last = parts_.model.num_layers + 1;
    DELTAIC_CHECK(-1 <= layer && layer <= last, "hidden_layer is ", layer, ", the model has 0 to ", last);
    if (hook->fills_embeddings()) inputs_embeds_ = Tensor(DType::f32, {num_tokens, hidden_size});
    if (layer >= 0) layer_hidden_ = Tensor(DType::f32, {num_tokens, hidden_size});
  }
  hook_ = std::move(hook);
}

void CpuExecutor::show_step(const StepPlan& plan) {
  rows_.clear();
  for (int i = 0; i < plan.num_rows; ++i) {
    const BatchRow& row = parts_.planner.batch().row(i);
    rows_.push_back({.req_id = row.req_id,
                     .first_token = plan.inputs.query_start_loc[static_cast<std::size_t>(i)],
                     .num_tokens = row.num_scheduled_tokens,
                     .num_prompt_tokens = row.num_prompt_tokens,
                     .num_computed_tokens = row.num_computed_tokens});
  }
  const std::int64_t num_tokens = plan.inputs.query_start_loc.back();
  view_ = {.rows = rows_,
           .input_ids = view_of(plan.inputs.input_token_ids),
           .positions = view_of(plan.inputs.positions),
           .inputs_embeds = {},
           .hidden = {},
           .layer_hidden = {}};
  if (hook_->fills_embeddings()) view_.inputs_embeds = inputs_embeds_.view().slice(0, num_tokens);
  if (hook_->hidden_layer() >= 0) view_.layer_hidden = layer_hidden_.view().slice(0, num_tokens);
}

}  // namespace deltaic

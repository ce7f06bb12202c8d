#include "cpp/src/runner/step_plan.h"

#include "cpp/src/runner/attention_metadata.h"
#include "cpp/src/runner/batch_update.h"
#include "cpp/src/runner/step_checks.h"
#include "cpp/src/runner/step_drafts.h"

namespace deltaic {

StepPlanner::StepPlanner(const CacheGroups& groups, const RunnerOptions& options, std::int64_t num_blocks,
                         int vocab_size)
    : groups_(groups),
      options_(options),
      num_blocks_(num_blocks),
      vocab_size_(vocab_size),
      batch_(options.max_num_reqs, groups.block_table_row_strides),
      snapshot_tokens_(static_cast<std::size_t>(groups.num_snapshot_slots), -1) {
  if (groups.gdn_group >= 0) slots_.emplace(groups.num_running_slots);
}

const StepPlan& StepPlanner::plan(const SchedulerOutput& step) {
  check_step(step, {.batch = batch_,
                    .preempted = preempted_,
                    .slots = slots_or_null(),
                    .snapshot_tokens = snapshot_tokens_,
                    .groups = groups_,
                    .options = options_,
                    .num_blocks = num_blocks_,
                    .vocab_size = vocab_size_});
  update_batch(step, batch_, preempted_, slots_or_null());
  const bool with_speculation = options_.num_speculative_tokens > 0;
  if (with_speculation) take_drafts(step, options_.async_input_combine, batch_);
  plan_.num_drafts = step.num_drafts.value_or(options_.num_speculative_tokens);
  const auto counts = reorder_.apply(batch_);
  plan_.num_rows = batch_.num_reqs() - counts[static_cast<std::size_t>(RowRegion::idle)];
  plan_.num_decodes = counts[static_cast<std::size_t>(RowRegion::decode)];
  build_step_inputs(batch_, plan_.num_rows, options_.async_input_combine, plan_.inputs);
  if (plan_.num_rows > 0) assign_state_slots();
  build_attention_metadata(batch_, plan_.num_rows, groups_.full_attn_group, groups_.block_size(), plan_.attention);
  plan_.attention.block_table.clear();
  if (slots_)
    build_gdn_metadata(batch_, plan_.num_rows, plan_.num_decodes, with_speculation, plan_.inputs.query_start_loc,
                       groups_.num_running_slots, plan_.gdn);
  plan_copies(step);
  return plan_;
}

void StepPlanner::assign_state_slots() {
  if (!slots_) return;
  slots_->reclaim();
  for (int i = 0; i < plan_.num_rows; ++i)
    if (BatchRow& row = batch_.row(i); row.state_slot < 0) row.state_slot = slots_->assign(row.req_id);
}

void StepPlanner::plan_copies(const SchedulerOutput& step) {
  plan_.copies_before.clear(), plan_.copies_after.clear();
  for (const StateCopy& copy : step.state_copies) {
    const int index = batch_.find(copy.req_id);
    const BatchRow& row = batch_.row(index);
    if (copy.kind == StateCopyKind::hit) {
      plan_.copies_before.push_back({.from = copy.snapshot_slot, .to = row.state_slot});
    } else {
      if (row.was_verified) {
        // What a verified step does not reach, or began behind, is another step's.
        const int offset = copy.num_tokens - row.num_computed_tokens - 1;
        if ((offset < 0 && !row.may_begin_earlier()) || copy.num_tokens > row.seq_len()) continue;
        plan_.gdn.snapshot_slots[static_cast<std::size_t>(index)] = copy.snapshot_slot;
        plan_.gdn.snapshot_offsets[static_cast<std::size_t>(index)] = offset;
      } else {
        plan_.copies_after.push_back({.from = row.state_slot, .to = copy.snapshot_slot});
      }
      snapshot_tokens_[static_cast<std::size_t>(copy.snapshot_slot - groups_.num_running_slots)] = copy.num_tokens;
    }
  }
}

std::map<std::string, int> StepPlanner::state_slots() const {
  return slots_ ? slots_->slots() : std::map<std::string, int>{};
}

}  // namespace deltaic

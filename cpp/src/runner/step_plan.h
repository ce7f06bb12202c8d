#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/runner/batch_reorder.h"
#include "cpp/src/runner/cache_groups.h"
#include "cpp/src/runner/gdn_metadata.h"
#include "cpp/src/runner/input_batch.h"
#include "cpp/src/runner/state_slots.h"

namespace deltaic {

// A copy of a recurrent state from one slot to another.
struct SlotCopy {
  int from = 0, to = 0;
};

// What a step is: all that the host knows of it, the same on every device. It runs rows [0, num_rows) of the batch.
struct StepPlan {
  int num_rows = 0;
  int num_decodes = 0;  // the first so many rows
  StepInputs inputs;
  AttentionMetadataView attention;  // its block_table is filled when somebody asks
  GdnMetadata gdn;
  std::vector<SlotCopy> copies_before;  // the forward: prefix hits
  std::vector<SlotCopy> copies_after;   // the forward: snapshots of plain rows; verified ones write theirs in it
  int num_drafts = 0;                   // that are made for each request when the step was sampled
};

// Keeps the batch of a runner from step to step, and plans steps.
class StepPlanner {
 public:
  // `groups` and `options` must outlive the planner.
  StepPlanner(const CacheGroups& groups, const RunnerOptions& options, std::int64_t num_blocks, int vocab_size);

  // Checks the step, applies it to the batch and plans its forward. Throws InvalidArgument or Unsupported, changing
  // nothing, for a step that cannot run.
  const StepPlan& plan(const SchedulerOutput& step);

  // Of the last step, valid until the next; as are the rows of the batch.
  StepPlan& current() { return plan_; }
  InputBatch& batch() { return batch_; }
  // Requests that were preempted and may come back.
  std::map<std::string, BatchRow>& preempted() { return preempted_; }
  // req_id -> its running slot.
  std::map<std::string, int> state_slots() const;

 private:
  StateSlots* slots_or_null() { return slots_ ? &*slots_ : nullptr; }
  void assign_state_slots();
  void plan_copies(const SchedulerOutput& step);

  const CacheGroups& groups_;
  const RunnerOptions& options_;
  std::int64_t num_blocks_;
  int vocab_size_;
  InputBatch batch_;
  BatchReorder reorder_;
  std::map<std::string, BatchRow> preempted_;
  std::optional<StateSlots> slots_;   // none without GDN layers
  std::vector<int> snapshot_tokens_;  // tokens whose state each snapshot slot holds; -1: none
  StepPlan plan_;
};

}  // namespace deltaic

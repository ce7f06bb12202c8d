#include "cpp/src/runner/step_drafts.h"

#include <cassert>
#include <utility>

#include "cpp/src/runner/batch_reorder.h"

namespace deltaic {

namespace {

void set_drafts(const SchedulerOutput& step, bool combine, BatchRow& row) {
  const auto found = step.scheduled_spec_decode_tokens.find(row.req_id);
  if (found != step.scheduled_spec_decode_tokens.end()) row.scheduled_draft_ids = found->second;
  row.num_draft_tokens = static_cast<int>(row.scheduled_draft_ids.size());
  if (combine)
    for (std::size_t j = 0; j < row.scheduled_draft_ids.size() && j < row.draft_token_ids.size(); ++j)
      if (row.scheduled_draft_ids[j] < 0) row.scheduled_draft_ids[j] = row.draft_token_ids[j];
  row.draft_token_ids.clear();
}

}  // namespace

void take_drafts(const SchedulerOutput& step, bool combine, InputBatch& batch) {
  for (int i = 0; i < batch.num_reqs(); ++i) {
    BatchRow& row = batch.row(i);
    if (row.num_scheduled_tokens == 0) continue;
    set_drafts(step, combine, row);
    // What the step before computed beyond this one's begin was rejected.
    row.num_accepted_tokens = row.was_verified ? row.num_computed_tokens - row.verified_begin : 1;
    assert(row.num_accepted_tokens >= 1);
    row.has_replay = row.was_verified;
    row.was_verified = region_of(row) == RowRegion::decode;
    assert(row.was_verified || !row.has_replay);  // check_step
    row.verified_begin = row.num_computed_tokens;
    row.follows_sample = std::exchange(row.was_sampled, false);
  }
}

}  // namespace deltaic

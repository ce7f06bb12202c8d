#pragma once

#include <cstddef>
#include <map>
#include <string>

#include <deltaic/scheduler_output.h>

#include "cpp/src/runner/input_batch.h"
#include "cpp/src/runner/state_slots.h"

namespace deltaic {

// Tokens that a request keeps when a caller resumes it with `num_output_tokens` output tokens; none given: all.
int num_tokens_kept(const BatchRow& row, const CachedRequestData& cached, std::size_t index);

// Applies a step that check_step has passed to the batch, in this order: finished and preempted requests leave their
// rows, cached ones take their new counts and blocks, new ones enter, the rows are made dense; then every row gets its
// number of scheduled tokens.
//   preempted  row data of requests that may come back: a preemption fills it, a return or an end empties it. A request
//              that comes back keeps the seed that was drawn for it.
//   slots      null without GDN layers; requests that leave are marked as ended
void update_batch(const SchedulerOutput& step, InputBatch& batch, std::map<std::string, BatchRow>& preempted,
                  StateSlots* slots);

}  // namespace deltaic

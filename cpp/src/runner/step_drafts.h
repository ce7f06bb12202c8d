#pragma once

#include <deltaic/scheduler_output.h>

#include "cpp/src/runner/input_batch.h"

namespace deltaic {

// What speculation changes in the rows of a step that update_batch has applied: each row that runs gets its drafts, and
// how many tokens of its last verified step stand; and it is noted whether this step is verified. Drafts that the row
// made in its last step are used up.
//   combine  a placeholder takes the row's own draft, where there is one
void take_drafts(const SchedulerOutput& step, bool combine, InputBatch& batch);

}  // namespace deltaic

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include <deltaic/scheduler_output.h>

#include "cpp/src/runner/cache_groups.h"
#include "cpp/src/runner/input_batch.h"
#include "cpp/src/runner/state_slots.h"

namespace deltaic {

// What a step is checked against.
struct StepContext {
  const InputBatch& batch;
  const std::map<std::string, BatchRow>& preempted;  // requests that may come back
  const StateSlots* slots = nullptr;                 // null without GDN layers
  std::span<const int> snapshot_tokens;              // tokens whose state each snapshot slot holds; -1: none
  const CacheGroups& groups;
  const RunnerOptions& options;
  std::int64_t num_blocks = 0;
  int vocab_size = 0;
};

// Throws InvalidArgument, naming the request and the numbers, for a step that the runner cannot run. Changes nothing,
// so the runner stays usable for every request.
void check_step(const SchedulerOutput& step, const StepContext& context);

}  // namespace deltaic

#pragma once

#include <memory>
#include <vector>

#include <deltaic/step_hook.h>

#include "cpp/src/runner/drafter.h"
#include "cpp/src/runner/sampling.h"
#include "cpp/src/runner/state_copies.h"
#include "cpp/src/runner/step_executor.h"

namespace deltaic {

// Runs a step when it is told to: nothing is ever in flight.
class CpuExecutor : public StepExecutor {
 public:
  explicit CpuExecutor(const ExecutorParts& parts);

  void forward(const StepPlan& plan) override;
  AsyncModelRunnerOutput sample(const StepPlan& plan) override;
  void settle(StepPlan&) override {}
  void set_hook(std::shared_ptr<StepHook> hook) override;

 private:
  // Fills view_ with the rows of the step.
  void show_step(const StepPlan& plan);
  void copy_states(std::span<const SlotCopy> copies);

  ExecutorParts parts_;
  HybridDecoder decoder_;
  StepSampler sampler_;
  std::optional<Drafter> drafter_;  // with a draft group
  StateCopier copier_;
  TensorView hidden_states_;  // of the last forward

  std::shared_ptr<StepHook> hook_;  // may be null; the rest is then unused
  std::vector<StepRow> rows_;
  StepView view_;
  Tensor inputs_embeds_, layer_hidden_;  // [max_num_batched_tokens, hidden_size] f32
};

}  // namespace deltaic

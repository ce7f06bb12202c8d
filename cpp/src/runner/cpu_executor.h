#pragma once

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

 private:
  void copy_states(std::span<const SlotCopy> copies);

  ExecutorParts parts_;
  HybridDecoder decoder_;
  StepSampler sampler_;
  StateCopier copier_;
  TensorView hidden_states_;  // of the last forward
};

}  // namespace deltaic

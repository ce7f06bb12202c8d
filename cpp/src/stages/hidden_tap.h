#pragma once

#include <memory>

#include <deltaic/step_hook.h>

#include "cpp/src/stages/stage_edge.h"

namespace deltaic {

// Hands a hidden state of every token over an edge, for the requests that are open there. Keeps nothing itself.
class HiddenTap : public StepHook {
 public:
  // layer: as StepHook::hidden_layer; -1: the output of the final norm.
  HiddenTap(int layer, std::shared_ptr<StageEdge> edge, PayloadKey key);

  int hidden_layer() const override { return layer_; }
  void after_forward(const StepView& step) override;

 private:
  int layer_;
  std::shared_ptr<StageEdge> edge_;
  PayloadKey key_;
};

}  // namespace deltaic

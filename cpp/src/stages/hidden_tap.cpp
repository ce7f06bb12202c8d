#include "cpp/src/stages/hidden_tap.h"

#include "cpp/src/check.h"

namespace deltaic {

HiddenTap::HiddenTap(int layer, std::shared_ptr<StageEdge> edge, PayloadKey key)
    : layer_(layer), edge_(std::move(edge)), key_(std::move(key)) {
  DELTAIC_CHECK(edge_ != nullptr && edge_->carries(key_), "the edge of a tap does not carry ", key_.first, ".",
                key_.second);
}

void HiddenTap::after_forward(const StepView& step) {
  const TensorView& source = layer_ < 0 ? step.hidden : step.layer_hidden;
  for (const StepRow& row : step.rows)
    if (edge_->is_open(row.req_id))  // what is run again, after a preemption, is written again
      edge_->put_or_fail(row.req_id, key_, source.slice(row.first_token, row.first_token + row.num_tokens),
                         row.num_computed_tokens);
}

}  // namespace deltaic

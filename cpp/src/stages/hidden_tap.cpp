#include "cpp/src/stages/hidden_tap.h"

#include "cpp/src/check.h"

namespace deltaic {

std::vector<float> HiddenTap::rows(const std::string& req_id, int begin) const {
  const auto found = rows_.find(req_id);
  const std::size_t first = static_cast<std::size_t>(begin) * static_cast<std::size_t>(hidden_size_);
  if (found == rows_.end() || first >= found->second.size()) return {};
  return {found->second.begin() + static_cast<std::ptrdiff_t>(first), found->second.end()};
}

void HiddenTap::after_forward(const StepView& step) {
  const TensorView& source = layer_ < 0 ? step.hidden : step.layer_hidden;
  hidden_size_ = static_cast<int>(source.shape[1]);
  const auto width = static_cast<std::size_t>(hidden_size_);
  for (const StepRow& row : step.rows) {
    const auto found = rows_.find(row.req_id);
    if (found == rows_.end()) continue;
    std::vector<float>& kept = found->second;
    // What is run again, after a preemption, is written again.
    const std::size_t begin = static_cast<std::size_t>(row.num_computed_tokens) * width;
    DELTAIC_CHECK(begin <= kept.size(), "request ", row.req_id, " starts at token ", row.num_computed_tokens,
                  ", the hidden states before it were not seen: no prefix cache may be used");
    kept.resize(begin);
    const float* values = source.as<float>() + static_cast<std::size_t>(row.first_token) * width;
    kept.insert(kept.end(), values, values + static_cast<std::size_t>(row.num_tokens) * width);
  }
}

}  // namespace deltaic

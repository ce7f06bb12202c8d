#include <deltaic/error.h>
#include <deltaic/step_hook.h>

#include "cpp/src/check.h"

namespace deltaic {

RowPlan plan_rows(std::span<const StepRow> rows, int num_step_tokens, const RowPlanOptions& options) {
  int expected = rows.empty() ? 0 : rows.front().first_token;
  for (const StepRow& row : rows) {
    const bool fits = row.first_token >= 0 && row.num_tokens >= 1 && row.first_token == expected &&
                      row.first_token + row.num_tokens <= num_step_tokens;
    if (!fits)
      throw Error(detail::concat(
          "Non-MTP batched decode preprocessing requires contiguous in-bounds token offsets: ", "request ", row.req_id,
          " has tokens [", row.first_token, ", ", row.first_token + row.num_tokens, "), expected them at ", expected,
          " of ", num_step_tokens));
    expected = row.first_token + row.num_tokens;
  }
  RowPlan plan;
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    const StepRow& row = rows[static_cast<std::size_t>(i)];
    const bool is_eligible = row.num_tokens == 1 && !row.is_prefill();
    const bool is_batched = is_eligible && options.has_batched_hook;
    if (is_eligible && options.has_predictor) plan.predictor_rows.push_back(i);
    if (is_batched && !plan.runs.empty() && plan.runs.back().is_batched)
      ++plan.runs.back().num_rows;
    else
      plan.runs.push_back({.first_row = i, .num_rows = 1, .is_batched = is_batched});
  }
  return plan;
}

}  // namespace deltaic

#include "cpp/src/stages/stage_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

void copy(TensorView from, TensorView to) { std::memcpy(to.data, from.data, from.num_bytes()); }

TensorView tokens_of(const Tensor& tensor, const StepRow& row) {
  return tensor.view().slice(row.first_token, row.first_token + row.num_tokens);
}

}  // namespace

StageRunner::StageRunner(int hidden_size, int max_num_tokens) {
  DELTAIC_CHECK(hidden_size >= 1, "hidden_size must be at least 1, got ", hidden_size);
  DELTAIC_CHECK(max_num_tokens >= 1, "max_num_tokens must be at least 1, got ", max_num_tokens);
  ids_ = Tensor(DType::i32, {max_num_tokens}), staged_ids_ = Tensor(DType::i32, {max_num_tokens});
  embeds_ = Tensor(DType::f32, {max_num_tokens, hidden_size});
  staged_embeds_ = Tensor(DType::f32, {max_num_tokens, hidden_size});
}

void StageRunner::before_forward(const StepView& step) {
  prepare(step.rows, step.input_ids);
  copy(embeds().slice(0, step.input_ids.shape[0]), step.inputs_embeds);
  begin_step(step);
}

RowPlan StageRunner::prepare(std::span<const StepRow> rows, TensorView ids) {
  const std::int64_t num_tokens = ids.shape[0];
  DELTAIC_CHECK(num_tokens <= ids_.view().shape[0], "a step of ", num_tokens, " tokens, max_num_tokens is ",
                ids_.view().shape[0]);
  RowPlan plan = plan_rows(rows, static_cast<int>(num_tokens),
                           {.has_batched_hook = has_batched_hook(), .has_predictor = has_predictor()});
  refused_.clear();
  copy(ids, staged_ids_.view().slice(0, num_tokens));
  for (const RowRun& run : plan.runs)
    run_hooks(rows.subspan(static_cast<std::size_t>(run.first_row), static_cast<std::size_t>(run.num_rows)),
              run.is_batched);
  std::vector<StepRow> good, predicted;
  for (const int i : plan.predictor_rows)
    if (const StepRow& row = rows[static_cast<std::size_t>(i)]; !refused_.contains(row.req_id))
      predicted.push_back(row);
  if (!predicted.empty()) {
    const std::int64_t count = static_cast<std::int64_t>(predicted.size()), width = embeds_.view().shape[1];
    if (predicted_.view().data == nullptr || predicted_.view().shape[0] < count)
      predicted_ = Tensor(DType::f32, {count, width});
    predict(predicted, predicted_.view().slice(0, count));
  }
  // Nothing below throws.
  for (const StepRow& row : rows) {
    copy(tokens_of(staged_ids_, row), tokens_of(ids_, row));
    if (refused_.contains(row.req_id)) {
      const TensorView zeros = tokens_of(embeds_, row);
      std::memset(zeros.data, 0, zeros.num_bytes());
    } else {
      copy(tokens_of(staged_embeds_, row), tokens_of(embeds_, row));
      good.push_back(row);
    }
  }
  for (std::size_t i = 0; i < predicted.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    copy(predicted_.view().slice(index, index + 1), tokens_of(embeds_, predicted[i]));
  }
  failures_.merge(refused_);
  if (!good.empty()) commit(good);
  return plan;
}

void StageRunner::run_hooks(std::span<const StepRow> rows, bool is_batched) {
  const int begin = rows.front().first_token, end = rows.back().first_token + rows.back().num_tokens;
  const TensorView ids = staged_ids_.view().slice(begin, end);
  const std::optional<std::string> why = preprocess(rows, is_batched, ids, staged_embeds_.view().slice(begin, end));
  if (!why) return;
  if (rows.size() == 1) {
    refused_.insert_or_assign(rows.front().req_id, *why);
    return;
  }
  for (std::size_t i = 0; i < rows.size(); ++i) run_hooks(rows.subspan(i, 1), is_batched);  // find whom it is about
}

std::map<std::string, std::string> StageRunner::take_failures() { return std::exchange(failures_, {}); }

}  // namespace deltaic

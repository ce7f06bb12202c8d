#include "cpp/src/runner/batch_update.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace deltaic {

namespace {

using PreemptedRows = std::map<std::string, BatchRow>;

void drop(const SchedulerOutput& step, InputBatch& batch, PreemptedRows& preempted, StateSlots* slots) {
  for (const std::string& req_id : step.finished_req_ids) {
    preempted.erase(req_id);
    const int row = batch.find(req_id);
    if (row < 0) continue;
    batch.remove(row);
    if (slots != nullptr) slots->end(req_id);
  }
  for (const std::string& req_id : step.preempted_req_ids) {
    const int row = batch.find(req_id);
    if (row < 0) continue;
    preempted.insert_or_assign(req_id, batch.remove(row));
    if (slots != nullptr) slots->end(req_id);
  }
}

// What the scheduler knows of the request is what is known at admission, and the computed count starts anew.
void readmit(BatchRow& row, const CachedRequestData& cached, std::size_t index) {
  row.token_ids.resize(static_cast<std::size_t>(num_tokens_kept(row, cached, index)));
  row.num_computed_tokens = cached.num_computed_tokens[index];
  row.prefill_length = row.num_tokens();
  row.num_uploaded_blocks = 0;
  row.is_in_sampler = false;
  row.forget_drafts();
}

void update_cached(const CachedRequestData& cached, InputBatch& batch, PreemptedRows& preempted) {
  for (std::size_t i = 0; i < cached.req_ids.size(); ++i) {
    const std::string& req_id = cached.req_ids[i];
    const bool is_resumed =
        std::find(cached.resumed_req_ids.begin(), cached.resumed_req_ids.end(), req_id) != cached.resumed_req_ids.end();
    const std::vector<std::vector<int>>* block_ids = nullptr;
    if (!cached.new_block_ids.empty())
      if (const auto& given = cached.new_block_ids[i]; given.has_value()) block_ids = &*given;
    const int row = batch.find(req_id);
    if (row < 0) {
      const auto found = preempted.find(req_id);
      if (!is_resumed || found == preempted.end()) continue;
      BatchRow request = std::move(found->second);
      preempted.erase(found);
      request.state_slot = -1;
      readmit(request, cached, i);
      batch.add(std::move(request), *block_ids);
      continue;
    }
    if (is_resumed)
      readmit(batch.row(row), cached, i);
    else
      batch.row(row).num_computed_tokens = batch.row(row).true_num_computed(cached.num_computed_tokens[i]);
    if (block_ids == nullptr) continue;
    for (int group = 0; group < batch.num_groups(); ++group) {
      const auto& ids = (*block_ids)[static_cast<std::size_t>(group)];
      if (is_resumed)
        batch.block_table(group).assign(row, ids);
      else
        batch.block_table(group).append(row, ids);
    }
  }
}

void add_new(const SchedulerOutput& step, InputBatch& batch, PreemptedRows& preempted) {
  for (const NewRequestData& request : step.scheduled_new_reqs) {
    BatchRow row = make_batch_row(request);
    if (const auto found = preempted.find(request.req_id); found != preempted.end()) {
      if (!row.is_seeded && !found->second.is_seeded) row.seed = found->second.seed;
      preempted.erase(found);
    }
    batch.add(std::move(row), request.block_ids);
  }
}

void set_scheduled_tokens(const SchedulerOutput& step, InputBatch& batch) {
  for (int i = 0; i < batch.num_reqs(); ++i) {
    batch.row(i).num_scheduled_tokens = 0;
    batch.row(i).num_draft_tokens = 0;
    batch.row(i).scheduled_draft_ids.clear();
  }
  for (const auto& [req_id, count] : step.num_scheduled_tokens)
    if (const int row = batch.find(req_id); row >= 0) batch.row(row).num_scheduled_tokens = count;
}

// Output tokens that the scheduler discarded are forgotten. What the step itself runs on is not: a scheduler that is
// ahead of the output counts one token less.
void forget_discarded_tokens(const CachedRequestData& cached, InputBatch& batch) {
  for (std::size_t i = 0; i < cached.num_output_tokens.size(); ++i) {
    const int index = batch.find(cached.req_ids[i]);
    if (index < 0) continue;
    BatchRow& row = batch.row(index);
    if (row.num_scheduled_tokens == 0) continue;
    const int kept = std::max({row.num_prompt_tokens + cached.num_output_tokens[i], row.prefill_length, row.seq_len()});
    if (kept >= row.num_tokens()) continue;
    row.token_ids.resize(static_cast<std::size_t>(kept));
    row.is_in_sampler = false;
  }
}

}  // namespace

int num_tokens_kept(const BatchRow& row, const CachedRequestData& cached, std::size_t index) {
  if (cached.num_output_tokens.empty()) return row.num_tokens();
  return std::min(row.num_tokens(), row.num_prompt_tokens + cached.num_output_tokens[index]);
}

void update_batch(const SchedulerOutput& step, InputBatch& batch, PreemptedRows& preempted, StateSlots* slots) {
  drop(step, batch, preempted, slots);
  update_cached(step.scheduled_cached_reqs, batch, preempted);
  add_new(step, batch, preempted);
  batch.condense();
  set_scheduled_tokens(step, batch);
  forget_discarded_tokens(step.scheduled_cached_reqs, batch);
}

}  // namespace deltaic

#include "cpp/src/runner/step_results.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpp/src/ops/sampler.h"

namespace deltaic {

StepResults::StepResults(StepPlanner& planner, int vocab_size, int max_num_samples, int max_columns)
    : planner_(&planner), vocab_size_(vocab_size), max_num_samples_(max_num_samples), max_columns_(max_columns) {}

std::shared_ptr<StepResult> StepResults::open() {
  // One that nobody holds may have been dropped without being read: the batch still wants its tokens.
  const auto is_free = [](const auto& result) { return result.use_count() == 1; };
  std::shared_ptr<StepResult> result;
  if (const auto free = std::find_if(pool_.begin(), pool_.end(), is_free); free != pool_.end()) {
    result = *free;
    read(*result);
  } else {
    result = pool_.emplace_back(std::make_shared<StepResult>());
    const auto rows = static_cast<std::size_t>(max_num_samples_),
               entries = rows * (1 + static_cast<std::size_t>(max_columns_));
    result->memory = cuda::PinnedBuffer(entries * 8 + rows * 9);
    std::byte* next = result->memory.data();
    const auto take = [&]<class T>(T*& array, std::size_t count) {
      array = reinterpret_cast<T*>(next);
      next += count * sizeof(T);
    };
    take(result->logprob_token_ids, entries), take(result->logprobs, entries);
    take(result->token_ids, rows), take(result->ranks, rows), take(result->is_finite, rows);
  }
  last_placeholder_ = last_placeholder_ == std::numeric_limits<std::int32_t>::min() ? -1 : last_placeholder_ - 1;
  result->placeholder = last_placeholder_;
  result->output = {};
  result->samples.clear(), result->logits_samples.clear();
  result->columns = 0;
  result->was_read = false;
  return result;
}

void StepResults::read(StepResult& result) {
  if (result.was_read) return;
  result.is_done.wait();
  result.was_read = true;
  for (std::size_t i = 0; i < result.samples.size(); ++i) take_token(result, i);
}

void StepResults::read_all() {
  // The newest last, as they were sampled.
  std::vector<StepResult*> unread;
  for (const auto& result : pool_)
    if (!result->was_read) unread.push_back(result.get());
  std::sort(unread.begin(), unread.end(),
            [](const StepResult* a, const StepResult* b) { return a->placeholder > b->placeholder; });
  for (StepResult* result : unread) read(*result);
}

void StepResults::take_token(StepResult& result, std::size_t index) {
  const StepResult::Sample& sample = result.samples[index];
  const std::string& req_id = result.output.req_ids[static_cast<std::size_t>(sample.row)];
  const bool is_good = sample.is_wanted && result.is_finite[index] != 0;
  const std::int32_t token = result.token_ids[index];
  replace_placeholder(result, sample, is_good ? std::optional(token) : std::nullopt);
  if (!sample.is_wanted) return;
  if (!is_good) {
    result.output.failed_req_ids.push_back(req_id);
    return;
  }
  result.output.sampled_token_ids[static_cast<std::size_t>(sample.row)].push_back(token);
  if (sample.num_logprobs >= 0) {
    const std::size_t first = index * (1 + static_cast<std::size_t>(result.columns));
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(sample.num_logprobs, vocab_size_)) + 1;
    result.output.logprobs[req_id].push_back(
        {.token_ids = {result.logprob_token_ids + first, result.logprob_token_ids + first + count},
         .logprobs = {result.logprobs + first, result.logprobs + first + count},
         .rank = result.ranks[index]});
  }
  const auto found = std::find(result.logits_samples.begin(), result.logits_samples.end(), static_cast<int>(index));
  if (found == result.logits_samples.end()) return;
  const auto* logits =
      reinterpret_cast<const float*>(result.logits.data()) + (found - result.logits_samples.begin()) * vocab_size_;
  result.output.logprobs[req_id].push_back(
      ops::token_logprobs(std::span(logits, static_cast<std::size_t>(vocab_size_)), token, sample.num_host_logprobs));
}

void StepResults::replace_placeholder(const StepResult& result, const StepResult::Sample& sample,
                                      std::optional<std::int32_t> token) {
  if (planner_ == nullptr) return;
  InputBatch& batch = planner_->batch();
  const std::string& req_id = result.output.req_ids[static_cast<std::size_t>(sample.row)];
  BatchRow* request = nullptr;
  if (const int row = batch.find(req_id); row >= 0) {
    request = &batch.row(row);
    if (batch.last_sampled_tokens()[static_cast<std::size_t>(row)] == result.placeholder)
      batch.set_last_sampled_token(row, token.value_or(0));
  } else if (const auto found = planner_->preempted().find(req_id); found != planner_->preempted().end()) {
    request = &found->second;
  }
  const auto position = static_cast<std::size_t>(sample.position);
  if (request == nullptr || position >= request->token_ids.size() || request->token_ids[position] != result.placeholder)
    return;
  if (!token && position + 1 == request->token_ids.size())
    request->token_ids.pop_back();
  else
    request->token_ids[position] = token.value_or(0);
}

}  // namespace deltaic

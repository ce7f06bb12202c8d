#include "cpp/src/runner/step_results.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpp/src/ops/sampler.h"

namespace deltaic {

StepResults::StepResults(StepPlanner& planner, int vocab_size, int max_num_rows, int max_drafts, int max_columns)
    : planner_(&planner),
      vocab_size_(vocab_size),
      max_num_rows_(max_num_rows),
      max_drafts_(max_drafts),
      max_columns_(max_columns) {}

std::shared_ptr<StepResult> StepResults::open() {
  // One that nobody holds may have been dropped without being read: the batch still wants its tokens.
  const auto is_free = [](const auto& result) { return result.use_count() == 1; };
  std::shared_ptr<StepResult> result;
  if (const auto free = std::find_if(pool_.begin(), pool_.end(), is_free); free != pool_.end()) {
    result = *free;
    read(*result);
  } else {
    result = pool_.emplace_back(std::make_shared<StepResult>());
    const auto rows = static_cast<std::size_t>(max_num_rows_) * (1 + static_cast<std::size_t>(max_drafts_)),
               entries = rows * (1 + static_cast<std::size_t>(max_columns_)),
               words = static_cast<std::size_t>(VerifiedWords::count(max_num_rows_, max_drafts_));
    result->memory = cuda::PinnedBuffer(entries * 8 + rows * 9 + words * 4);
    std::byte* next = result->memory.data();
    const auto take = [&]<class T>(T*& array, std::size_t count) {
      array = reinterpret_cast<T*>(next);
      next += count * sizeof(T);
    };
    take(result->logprob_token_ids, entries), take(result->logprobs, entries);
    take(result->verified, words), take(result->token_ids, rows), take(result->ranks, rows);
    take(result->is_finite, rows);
  }
  last_placeholder_ = last_placeholder_ == std::numeric_limits<std::int32_t>::min() ? -1 : last_placeholder_ - 1;
  result->placeholder = last_placeholder_;
  result->output = {};
  result->samples.clear(), result->logits_samples.clear();
  result->columns = result->num_rows = 0;
  result->makes_drafts = false;
  result->was_read = false;
  return result;
}

void StepResults::read(StepResult& result) {
  if (result.was_read) return;
  result.is_done.wait();
  result.was_read = true;
  if (result.makes_drafts) result.output.draft_token_ids.assign(result.output.req_ids.size(), {});
  for (const StepResult::Sample& sample : result.samples) take_tokens(result, sample);
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

void StepResults::take_tokens(StepResult& result, const StepResult::Sample& sample) {
  const auto row = static_cast<std::size_t>(sample.row), first = static_cast<std::size_t>(sample.first);
  std::span<const std::int32_t> tokens(result.token_ids + first, 1);
  bool is_finite = result.is_finite[first] != 0;
  if (max_drafts_ > 0) {
    const VerifiedWords words(result.verified, result.num_rows, max_drafts_);
    tokens = {words.token_ids + row * static_cast<std::size_t>(1 + max_drafts_),
              static_cast<std::size_t>(words.counts[row])};
    is_finite = words.is_finite[row] != 0;
    if (result.makes_drafts && sample.is_wanted) {
      const std::span<const std::int32_t> drafts(words.drafts + row * static_cast<std::size_t>(max_drafts_),
                                                 static_cast<std::size_t>(max_drafts_));
      result.output.draft_token_ids[row].assign(drafts.begin(), std::find(drafts.begin(), drafts.end(), -1));
    }
  }
  const bool is_good = sample.is_wanted && is_finite;
  replace_placeholders(result, sample, is_good ? tokens : std::span<const std::int32_t>());
  if (!sample.is_wanted) return;
  if (!is_good) {
    result.output.failed_req_ids.push_back(result.output.req_ids[row]);
    return;
  }
  result.output.sampled_token_ids[row].assign(tokens.begin(), tokens.end());
  for (std::size_t j = 0; j < tokens.size(); ++j)
    take_logprobs(result, sample, sample.first + static_cast<int>(j), tokens[j]);
}

void StepResults::take_logprobs(StepResult& result, const StepResult::Sample& sample, int index,
                                std::int32_t token) const {
  const std::string& req_id = result.output.req_ids[static_cast<std::size_t>(sample.row)];
  if (sample.num_logprobs >= 0) {
    const std::size_t first = static_cast<std::size_t>(index) * (1 + static_cast<std::size_t>(result.columns));
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(sample.num_logprobs, vocab_size_)) + 1;
    result.output.logprobs[req_id].push_back(
        {.token_ids = {result.logprob_token_ids + first, result.logprob_token_ids + first + count},
         .logprobs = {result.logprobs + first, result.logprobs + first + count},
         .rank = result.ranks[index]});
  }
  const auto found = std::find(result.logits_samples.begin(), result.logits_samples.end(), index);
  if (found == result.logits_samples.end()) return;
  const auto* logits =
      reinterpret_cast<const float*>(result.logits.data()) + (found - result.logits_samples.begin()) * vocab_size_;
  result.output.logprobs[req_id].push_back(
      ops::token_logprobs(std::span(logits, static_cast<std::size_t>(vocab_size_)), token, sample.num_host_logprobs));
}

void StepResults::replace_placeholders(const StepResult& result, const StepResult::Sample& sample,
                                       std::span<const std::int32_t> tokens) {
  if (planner_ == nullptr) return;
  InputBatch& batch = planner_->batch();
  const std::string& req_id = result.output.req_ids[static_cast<std::size_t>(sample.row)];
  BatchRow* request = nullptr;
  if (const int row = batch.find(req_id); row >= 0) {
    request = &batch.row(row);
    if (batch.last_sampled_tokens()[static_cast<std::size_t>(row)] == result.placeholder)
      batch.set_last_sampled_token(row, tokens.empty() ? 0 : tokens.back());
  } else if (const auto found = planner_->preempted().find(req_id); found != planner_->preempted().end()) {
    request = &found->second;
  }
  if (request == nullptr) return;
  auto& ids = request->token_ids;
  const auto last = std::find(ids.rbegin(), ids.rend(), result.placeholder);
  const auto first = std::find_if(last, ids.rend(), [&](std::int32_t id) { return id != result.placeholder; });
  const auto begin = first.base() - ids.begin();
  const auto count = last.base() - first.base();
  if (count == 0) return;
  const bool is_newest = last == ids.rbegin();
  const std::int32_t none = 0;
  if (tokens.empty()) tokens = {&none, is_newest ? 0U : 1U};
  const auto num_kept = std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(tokens.size()), count);
  ids.erase(std::copy(tokens.begin(), tokens.begin() + num_kept, ids.begin() + begin), ids.begin() + begin + count);
  request->drop_rejected(static_cast<int>(begin), 1 + sample.num_drafts - std::max(static_cast<int>(num_kept), 1));
}

}  // namespace deltaic

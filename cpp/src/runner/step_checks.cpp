#include "cpp/src/runner/step_checks.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/runner/batch_update.h"

namespace deltaic {

namespace {

// A request as the step will find it, once all changes are applied.
struct Upcoming {
  int num_tokens = 0;  // known
  int num_computed_tokens = 0;
  int num_blocks = 0;  // of the target's attention group
  bool owns_slot = false;
};

class StepChecker {
 public:
  StepChecker(const SchedulerOutput& step, const StepContext& context)
      : step_(step), context_(context), upcoming_(static_cast<std::size_t>(context.batch.num_reqs())) {}

  void check() {
    drop();
    update_cached();
    add_new();
    DELTAIC_CHECK(num_live_ <= context_.options.max_num_reqs, "the step makes ", num_live_,
                  " requests live, max_num_reqs is ", context_.options.max_num_reqs);
    check_drafts();
    check_scheduled();
    for (const StateCopy& copy : step_.state_copies) check_copy(copy);
  }

 private:
  using BlockLists = std::vector<std::vector<int>>;

  void drop() {
    dropped_.assign(upcoming_.size(), false);
    num_live_ = context_.batch.num_reqs();
    for (const auto* ids : {&step_.finished_req_ids, &step_.preempted_req_ids})
      for (const std::string& req_id : *ids) {
        const int row = context_.batch.find(req_id);
        if (row < 0 || dropped_[static_cast<std::size_t>(row)]) continue;
        dropped_[static_cast<std::size_t>(row)] = true;
        --num_live_;
      }
    for (std::size_t i = 0; i < upcoming_.size(); ++i) {
      const BatchRow& row = context_.batch.row(static_cast<int>(i));
      upcoming_[i] = {row.num_tokens(), row.num_computed_tokens,
                      context_.batch.block_table(context_.groups.full_attn_group).num_blocks(static_cast<int>(i)),
                      row.state_slot >= 0};
    }
    if (context_.slots == nullptr) return;
    num_slots_owned_ = context_.slots->num_live();
    for (std::size_t i = 0; i < upcoming_.size(); ++i)
      if (dropped_[i] && upcoming_[i].owns_slot) --num_slots_owned_;
  }

  // The row of a request that lives on through this step; -1 without one.
  int live_row(const std::string& req_id) const {
    const int row = context_.batch.find(req_id);
    return row >= 0 && !dropped_[static_cast<std::size_t>(row)] ? row : -1;
  }

  // The request that a resumed id brings back; null when there is none.
  const BatchRow* preempted_request(const std::string& req_id) const {
    const auto contains = [&](const std::vector<std::string>& ids) {
      return std::find(ids.begin(), ids.end(), req_id) != ids.end();
    };
    if (!contains(step_.scheduled_cached_reqs.resumed_req_ids) || contains(step_.finished_req_ids)) return nullptr;
    if (const auto found = context_.preempted.find(req_id); found != context_.preempted.end()) return &found->second;
    const int row = context_.batch.find(req_id);
    return row >= 0 && contains(step_.preempted_req_ids) ? &context_.batch.row(row) : nullptr;
  }

  // replaces: the ids take the place of the row's instead of being appended.
  void check_blocks(const std::string& req_id, const BlockLists& block_ids, int row, bool replaces) const {
    const int num_groups = context_.batch.num_groups();
    DELTAIC_CHECK(block_ids.size() == static_cast<std::size_t>(num_groups), "request ", req_id, " has block ids for ",
                  block_ids.size(), " groups, the KV-cache config has ", num_groups);
    for (int group = 0; group < num_groups; ++group) {
      const auto& ids = block_ids[static_cast<std::size_t>(group)];
      const BlockTable& table = context_.batch.block_table(group);
      const std::string& group_name = context_.groups.group_names[static_cast<std::size_t>(group)];
      const std::int64_t total = (replaces ? 0 : table.num_blocks(row)) + static_cast<std::int64_t>(ids.size());
      DELTAIC_CHECK(total <= table.row_stride(), "request ", req_id, " has ", total, " blocks of ", group_name,
                    ", a row has ", table.row_stride(), " for max_model_len ", context_.options.max_model_len);
      for (const int id : ids)
        DELTAIC_CHECK(id >= 0 && (group == context_.groups.gdn_group || id < context_.num_blocks), "request ", req_id,
                      " has block ", id, " of ", group_name, ", which has ", context_.num_blocks, " blocks");
    }
  }

  int num_target_blocks(const BlockLists& block_ids) const {
    return static_cast<int>(block_ids[static_cast<std::size_t>(context_.groups.full_attn_group)].size());
  }

  void update_cached() {
    const CachedRequestData& cached = step_.scheduled_cached_reqs;
    const std::size_t count = cached.req_ids.size();
    DELTAIC_CHECK(cached.num_computed_tokens.size() == count, "scheduled_cached_reqs has ", count, " ids and ",
                  cached.num_computed_tokens.size(), " num_computed_tokens");
    DELTAIC_CHECK(cached.num_output_tokens.empty() || cached.num_output_tokens.size() == count,
                  "scheduled_cached_reqs has ", count, " ids and ", cached.num_output_tokens.size(),
                  " num_output_tokens");
    DELTAIC_CHECK(cached.new_block_ids.empty() || cached.new_block_ids.size() == count, "scheduled_cached_reqs has ",
                  count, " ids and ", cached.new_block_ids.size(), " new_block_ids");
    std::vector<bool> seen(upcoming_.size(), false);
    for (std::size_t i = 0; i < count; ++i) {
      const std::string& req_id = cached.req_ids[i];
      const BlockLists* blocks = nullptr;
      if (!cached.new_block_ids.empty())
        if (const auto& given = cached.new_block_ids[i]; given.has_value()) blocks = &*given;
      DELTAIC_CHECK(cached.num_computed_tokens[i] >= 0, "request ", req_id, " has num_computed_tokens ",
                    cached.num_computed_tokens[i]);
      DELTAIC_CHECK(cached.num_output_tokens.empty() || cached.num_output_tokens[i] >= 0, "request ", req_id,
                    " has num_output_tokens ", cached.num_output_tokens[i]);
      const int row = live_row(req_id);
      if (row < 0) {
        if (const BatchRow* request = preempted_request(req_id); request != nullptr) {
          DELTAIC_CHECK(blocks != nullptr, "request ", req_id, " is resumed without block ids");
          admit(req_id, {num_tokens_kept(*request, cached, i), cached.num_computed_tokens[i], 0, false}, *blocks);
        } else {
          ignored_.insert(req_id);
        }
        continue;
      }
      DELTAIC_CHECK(!seen[static_cast<std::size_t>(row)], "request ", req_id, " is twice in scheduled_cached_reqs");
      seen[static_cast<std::size_t>(row)] = true;
      Upcoming& request = upcoming_[static_cast<std::size_t>(row)];
      request.num_computed_tokens = cached.num_computed_tokens[i];
      const bool replaces = std::find(cached.resumed_req_ids.begin(), cached.resumed_req_ids.end(), req_id) !=
                            cached.resumed_req_ids.end();
      if (replaces) request.num_tokens = num_tokens_kept(context_.batch.row(row), cached, i);
      if (blocks == nullptr) continue;
      check_blocks(req_id, *blocks, row, replaces);
      request.num_blocks = (replaces ? 0 : request.num_blocks) + num_target_blocks(*blocks);
    }
  }

  void admit(const std::string& req_id, Upcoming request, const BlockLists& block_ids) {
    check_blocks(req_id, block_ids, 0, /*replaces=*/true);
    request.num_blocks = num_target_blocks(block_ids);
    DELTAIC_CHECK(admitted_.emplace(req_id, request).second, "request ", req_id, " is admitted twice in one step");
    ++num_live_;
  }

  void add_new() {
    for (const NewRequestData& request : step_.scheduled_new_reqs) {
      const std::string& req_id = request.req_id;
      DELTAIC_CHECK(!req_id.empty(), "a new request has an empty id");
      DELTAIC_CHECK(live_row(req_id) < 0, "new request ", req_id, " has the id of a live one");
      DELTAIC_CHECK(!request.prompt_token_ids.empty(), "request ", req_id, " has an empty prompt");
      const auto& known = request.prefill_token_ids.empty() ? request.prompt_token_ids : request.prefill_token_ids;
      const auto num_prompt = static_cast<std::ptrdiff_t>(request.prompt_token_ids.size());
      DELTAIC_CHECK(known.size() >= request.prompt_token_ids.size() &&
                        std::equal(request.prompt_token_ids.begin(), request.prompt_token_ids.end(), known.begin(),
                                   known.begin() + num_prompt),
                    "request ", req_id, ": its ", known.size(), " prefill_token_ids do not begin with its ", num_prompt,
                    " prompt_token_ids");
      DELTAIC_CHECK(known.size() <= static_cast<std::size_t>(context_.options.max_model_len), "request ", req_id,
                    " has ", known.size(), " tokens, max_model_len is ", context_.options.max_model_len);
      const auto outside = std::find_if(known.begin(), known.end(),
                                        [&](std::int32_t id) { return id < 0 || id >= context_.vocab_size; });
      DELTAIC_CHECK(outside == known.end(), "request ", req_id, ": token ", outside - known.begin(), " is ", *outside,
                    ", outside the vocabulary of ", context_.vocab_size);
      DELTAIC_CHECK(request.num_computed_tokens >= 0, "request ", req_id, " has num_computed_tokens ",
                    request.num_computed_tokens);
      validate(request.sampling_params, context_.vocab_size);
      admit(req_id, {static_cast<int>(known.size()), request.num_computed_tokens, 0, false}, request.block_ids);
    }
  }

  const Upcoming* find(const std::string& req_id) const {
    if (const int row = live_row(req_id); row >= 0) return &upcoming_[static_cast<std::size_t>(row)];
    const auto found = admitted_.find(req_id);
    return found == admitted_.end() ? nullptr : &found->second;
  }

  void check_scheduled() {
    std::int64_t total = 0;
    std::int64_t num_running = 0;
    int num_slots_needed = num_slots_owned_;
    for (const auto& [req_id, count] : step_.num_scheduled_tokens) {
      DELTAIC_CHECK(count >= 0, "request ", req_id, " has ", count, " scheduled tokens");
      total += count;
      const Upcoming* request = find(req_id);
      if (request == nullptr && ignored_.contains(req_id)) continue;
      DELTAIC_CHECK(request != nullptr, "request ", req_id, " is scheduled, but the runner does not know it");
      if (count == 0) continue;
      num_running += count;
      check_length(req_id, *request, count, num_drafts_of(req_id));
      check_accepted(req_id, *request, count);
      if (!request->owns_slot) ++num_slots_needed;
    }
    DELTAIC_CHECK(total == step_.total_num_scheduled_tokens, "total_num_scheduled_tokens is ",
                  step_.total_num_scheduled_tokens, ", num_scheduled_tokens adds up to ", total);
    DELTAIC_CHECK(num_running <= context_.options.max_num_batched_tokens, "the step has ", num_running,
                  " tokens, max_num_batched_tokens is ", context_.options.max_num_batched_tokens);
    if (context_.slots != nullptr)
      DELTAIC_CHECK(num_slots_needed <= context_.slots->capacity(), "the step has ", num_slots_needed,
                    " live sequences, there are state slots for ", context_.slots->capacity());
  }

  int num_drafts_of(const std::string& req_id) const {
    const auto found = step_.scheduled_spec_decode_tokens.find(req_id);
    return found == step_.scheduled_spec_decode_tokens.end() ? 0 : static_cast<int>(found->second.size());
  }

  // The step before may have computed more than was accepted; what was accepted stands, and a verified step follows.
  void check_accepted(const std::string& req_id, const Upcoming& request, int count) const {
    const int index = live_row(req_id);
    if (index < 0 || !context_.batch.row(index).was_verified) return;
    const BatchRow& row = context_.batch.row(index);
    const int begin = row.verified_begin, computed = row.true_num_computed(request.num_computed_tokens);
    DELTAIC_CHECK(computed > begin && computed <= begin + 1 + context_.options.num_speculative_tokens, "request ",
                  req_id, " goes on at token ", computed, ", its last step verified tokens from ", begin, " on, with ",
                  context_.options.num_speculative_tokens, " drafts at most");
    DELTAIC_CHECK(count == 1 + num_drafts_of(req_id) && computed + count >= row.num_tokens(), "request ", req_id,
                  " goes on with ", count, " tokens at token ", computed, " of ", row.num_tokens(), " with ",
                  num_drafts_of(req_id), " drafts: behind a verified step all known tokens but the last are computed");
  }

  void check_length(const std::string& req_id, const Upcoming& request, int count, int num_drafts) const {
    const std::int64_t seq_len = std::int64_t{request.num_computed_tokens} + count;
    DELTAIC_CHECK(seq_len <= context_.options.max_model_len, "request ", req_id, " would have ", seq_len,
                  " tokens, max_model_len is ", context_.options.max_model_len);
    // One token more may be in flight: a decode does not wait for the sample before it.
    DELTAIC_CHECK(count == 1 + num_drafts || seq_len <= request.num_tokens, "request ", req_id,
                  " is scheduled up to token ", seq_len, ", it has ", request.num_tokens);
    const std::int64_t capacity = std::int64_t{request.num_blocks} * context_.groups.block_size();
    DELTAIC_CHECK(seq_len <= capacity, "request ", req_id, " has ", request.num_blocks, " blocks of ",
                  context_.groups.block_size(), " tokens, too few for ", seq_len);
  }

  void check_drafts() const {
    const int most = context_.options.num_speculative_tokens;
    for (const auto& [req_id, drafts] : step_.scheduled_spec_decode_tokens) {
      const Upcoming* request = find(req_id);
      const auto scheduled = step_.num_scheduled_tokens.find(req_id);
      if (drafts.empty() || (request == nullptr && ignored_.contains(req_id))) continue;
      DELTAIC_CHECK(drafts.size() <= static_cast<std::size_t>(most), "request ", req_id, " has ", drafts.size(),
                    " draft tokens, num_speculative_tokens is ", most);
      DELTAIC_CHECK(request != nullptr && scheduled != step_.num_scheduled_tokens.end() &&
                        scheduled->second == 1 + static_cast<int>(drafts.size()),
                    "request ", req_id, " has ", drafts.size(), " draft tokens and ",
                    scheduled == step_.num_scheduled_tokens.end() ? 0 : scheduled->second,
                    " scheduled ones: one more than drafts is needed");
      DELTAIC_CHECK(request->num_computed_tokens >= std::max(1, request->num_tokens - 1), "request ", req_id,
                    " has draft tokens at token ", request->num_computed_tokens, ", before its newest, ",
                    request->num_tokens - 1, ", or nothing computed");
      for (const std::int32_t id : drafts)
        DELTAIC_CHECK(id >= -1 && id < context_.vocab_size, "request ", req_id, " has the draft token ", id,
                      ", outside the vocabulary of ", context_.vocab_size, " (-1 is a placeholder)");
    }
    DELTAIC_CHECK(!step_.num_drafts || (*step_.num_drafts >= 0 && *step_.num_drafts <= most), "num_drafts is ",
                  step_.num_drafts.value_or(0), ", num_speculative_tokens is ", most);
  }

  void check_copy(const StateCopy& copy) const {
    const int first = context_.groups.num_running_slots;
    const int end = first + context_.groups.num_snapshot_slots;
    DELTAIC_CHECK(copy.snapshot_slot >= first && copy.snapshot_slot < end, "state copy of request ", copy.req_id,
                  ": snapshot slot ", copy.snapshot_slot, " is not in [", first, ", ", end, ")");
    const auto scheduled = step_.num_scheduled_tokens.find(copy.req_id);
    const Upcoming* request = find(copy.req_id);
    DELTAIC_CHECK(request != nullptr && scheduled != step_.num_scheduled_tokens.end() && scheduled->second > 0,
                  "state copy of request ", copy.req_id, ", which does not run in this step");
    if (copy.kind == StateCopyKind::hit) {
      DELTAIC_CHECK(copy.num_tokens == request->num_computed_tokens, "state copy of request ", copy.req_id,
                    ": the snapshot is of ", copy.num_tokens, " tokens, the request has computed ",
                    request->num_computed_tokens);
      const int held = context_.snapshot_tokens[static_cast<std::size_t>(copy.snapshot_slot - first)];
      DELTAIC_CHECK(copy.num_tokens == held, "state copy of request ", copy.req_id, ": snapshot slot ",
                    copy.snapshot_slot,
                    held < 0 ? " holds nothing, wanted is the state after "
                             : " holds the state after another number of tokens than ",
                    copy.num_tokens);
    } else {
      const int seq_len = request->num_computed_tokens + scheduled->second;
      // A verified step leaves the state behind each of its tokens; it may begin earlier than the scheduler knows.
      const bool is_verified = context_.options.num_speculative_tokens > 0 && scheduled->second >= 1 &&
                               request->num_computed_tokens >= request->num_tokens - 1;
      const int shortest =
          is_verified ? request->num_computed_tokens + 1 - context_.options.num_speculative_tokens : seq_len;
      DELTAIC_CHECK(copy.num_tokens >= shortest && copy.num_tokens <= seq_len, "state copy of request ", copy.req_id,
                    ": a snapshot of ", copy.num_tokens, " tokens is wanted, the step ends at ", seq_len);
    }
  }

  const SchedulerOutput& step_;
  const StepContext& context_;
  std::vector<Upcoming> upcoming_;  // by row
  std::vector<bool> dropped_;       // by row
  std::map<std::string, Upcoming> admitted_;
  std::set<std::string> ignored_;  // cached ids that nobody knows
  int num_live_ = 0;
  int num_slots_owned_ = 0;
};

}  // namespace

void check_step(const SchedulerOutput& step, const StepContext& context) { StepChecker(step, context).check(); }

}  // namespace deltaic

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include <deltaic/scheduler_output.h>

#include "cpp/src/runner/block_table.h"

namespace deltaic {

// All that a live request owns in the batch, but its block-table rows and its last sampled token.
struct BatchRow {
  std::string req_id;
  // Prompt, then output. A negative one stands for a sampled token that the host has not read yet.
  std::vector<std::int32_t> token_ids;
  int num_prompt_tokens = 0;
  int prefill_length = 0;  // tokens known at admission: prompt, and output when the request comes back
  int num_computed_tokens = 0;
  int num_scheduled_tokens = 0;                   // of the current step; 0: the request does not run
  int num_draft_tokens = 0;                       // of num_scheduled_tokens, the last ones
  int num_accepted_tokens = 1;                    // of its last verified step
  std::vector<std::int32_t> scheduled_draft_ids;  // [num_draft_tokens] of the current step; -1: a placeholder
  std::vector<std::int32_t> draft_token_ids;      // made by its last step, behind token_ids

  // Of its last step: whether it was verified (GdnSequences::num_accepted), where it began, and whether its tokens were
  // chosen.
  bool was_verified = false;
  int verified_begin = 0;
  bool has_replay = false;  // its step before the last was verified too: ops::InitialState::replay
  bool was_sampled = false;
  bool follows_sample = false;  // was_sampled, of the step before the current one

  // Of its tokens, what the draft module's cache holds: the first num_drafted_tokens (-1: not known yet); then the
  // hidden states that the module has not read yet, a row a token. With a gap it holds no more, and nothing is drafted.
  int num_drafted_tokens = -1;
  bool has_draft_gap = false;
  std::vector<float> pending_hidden;
  int state_slot = -1;  // its running slot; -1: none yet
  SamplingParams sampling_params;
  std::uint64_t seed = 0;
  bool is_seeded = false;  // by the user; else seed was drawn for this request

  // What an executor with memory of its own knows the request by, and what it has of it.
  int slot = -1;                // in [0, max_num_reqs), from admission to the end: the batch gives it
  int num_uploaded_blocks = 0;  // of the attention group
  bool is_in_sampler = false;   // params and all of token_ids but those in flight
  int num_rejected_drafts = 0;  // of those that were read back since its first step

  // Nothing of the drafts of its earlier life is left.
  void forget_drafts() {
    num_accepted_tokens = 1;
    scheduled_draft_ids.clear(), draft_token_ids.clear();
    was_verified = was_sampled = follows_sample = has_replay = false;
    num_rejected_drafts = 0;
    verified_begin = 0;
    num_drafted_tokens = -1;
    has_draft_gap = false;
    pending_hidden.clear();
  }
  // Of a step whose tokens were put at `position`, so many drafts turn out wrong: what was planned behind them moves.
  void drop_rejected(int position, int count) {
    num_rejected_drafts += count;
    for (int* token : {&num_computed_tokens, &verified_begin})
      if (*token >= position) *token -= count;
  }
  // Its step before the current one was not read yet: where the current one begins depends on what was accepted there.
  bool may_begin_earlier() const { return follows_sample && token_ids.back() < 0; }
  int num_tokens() const { return static_cast<int>(token_ids.size()); }
  int num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  int seq_len() const { return num_computed_tokens + num_scheduled_tokens; }
  // The step does not reach the newest known token: nothing is sampled.
  bool is_partial_prefill() const { return seq_len() < num_tokens(); }
  // Where the row really begins when the scheduler says `scheduled`: one that is ahead of the output counts all drafts
  // in flight as accepted.
  int true_num_computed(int scheduled) const {
    return was_verified && was_sampled ? std::min(scheduled, num_tokens() - 1) : scheduled;
  }
  std::span<const std::int32_t> prompt_token_ids() const {
    return std::span(token_ids).first(static_cast<std::size_t>(num_prompt_tokens));
  }
  std::span<const std::int32_t> output_token_ids() const {
    return std::span(token_ids).subspan(static_cast<std::size_t>(num_prompt_tokens));
  }
};

// How the rows are sampled, as arrays by row.
struct SamplingMetadata {
  std::vector<float> temperature;  // 0: greedy
  std::vector<float> top_p;
  std::vector<int> top_k;  // the vocabulary size when off
  std::vector<float> min_p;
  std::map<int, std::uint64_t> generators;  // row -> seed, of rows that the user seeded
  bool all_greedy = true;
};

// The rows of the running batch, kept from step to step. Rows [0, num_reqs) are live once condense() has run.
class InputBatch {
 public:
  // row_strides: entries of a block-table row, one a KV-cache group.
  InputBatch(int max_num_reqs, std::span<const std::int64_t> row_strides);

  int num_reqs() const { return static_cast<int>(index_.size()); }
  int max_num_reqs() const { return static_cast<int>(rows_.size()); }
  std::vector<std::string> req_ids() const;  // in row order
  const std::unordered_map<std::string, int>& req_id_to_index() const { return index_; }
  // The row of a request; -1 when it is not live.
  int find(const std::string& req_id) const;

  const BatchRow& row(int row) const { return rows_[static_cast<std::size_t>(row)]; }
  BatchRow& row(int row) { return rows_[static_cast<std::size_t>(row)]; }
  int num_tokens(int row) const { return this->row(row).num_tokens(); }
  std::span<const std::int32_t> token_ids(int row) const { return this->row(row).token_ids; }
  int num_groups() const { return static_cast<int>(block_tables_.size()); }
  const BlockTable& block_table(int group) const { return block_tables_[static_cast<std::size_t>(group)]; }
  BlockTable& block_table(int group) { return block_tables_[static_cast<std::size_t>(group)]; }

  // [max_num_reqs]: the token that each row sampled last, negative while it is in flight. What a step with
  // async_input_combine reads.
  std::span<const std::int32_t> last_sampled_tokens() const { return last_sampled_tokens_; }

  // Puts a request into the lowest hole, or behind the last row, and returns the row; the request gets a slot.
  // `row.req_id` must not be live and a row must be free: the caller has checked. Nothing of the row's former owner is
  // left.
  int add(BatchRow row, std::span<const std::vector<int>> block_ids);
  // Takes a live request out and returns its row data. The row becomes a hole: its block-table entries are null.
  BatchRow remove(int row);
  // Moves the last live row into the lowest hole until there is none.
  void condense();
  // Exchanges everything that belongs to two live rows.
  void swap(int a, int b);
  // Writes a sampled token behind the known ones and remembers it as the last.
  void append_sampled_token(int row, std::int32_t token_id);
  void set_last_sampled_token(int row, std::int32_t token_id) {
    last_sampled_tokens_[static_cast<std::size_t>(row)] = token_id;
  }

  // Of the first num_rows rows.
  SamplingMetadata make_sampling_metadata(int num_rows, int vocab_size) const;
  SamplingMetadata make_sampling_metadata(int vocab_size) const {
    return make_sampling_metadata(num_reqs(), vocab_size);
  }

 private:
  std::vector<BatchRow> rows_;
  std::vector<std::int32_t> last_sampled_tokens_;
  std::vector<BlockTable> block_tables_;
  std::unordered_map<std::string, int> index_;
  std::vector<int> holes_;  // a min-heap
  std::vector<int> free_slots_;
  int end_ = 0;  // one past the last live row
};

// A row for a request that enters the batch. Draws a seed when the user gave none.
BatchRow make_batch_row(const NewRequestData& request);

}  // namespace deltaic

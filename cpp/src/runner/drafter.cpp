#include "cpp/src/runner/drafter.h"

#include <algorithm>

#include "cpp/src/ops/sampler.h"

namespace deltaic {

namespace {

template <class T>
TensorView view_of(std::vector<T>& values, DType dtype) {
  return make_view(values.data(), dtype, {static_cast<std::int64_t>(values.size())});
}

}  // namespace

void Drafter::Pass::clear() {
  input_ids.clear(), hidden_rows.clear(), query_start_loc.clear(), seq_lens.clear();
  positions.clear(), slot_mapping.clear();
}

void Drafter::Pass::end_row(int seq_len) {
  query_start_loc.push_back(static_cast<std::int32_t>(input_ids.size()));
  seq_lens.push_back(seq_len);
}

Drafter::Drafter(const ModelConfig& model, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
                 const RunnerOptions& options, const AttentionCacheViews& cache, int block_size)
    : ctx_(ctx),
      vocab_size_(model.vocab_size),
      block_size_(block_size),
      max_model_len_(options.max_model_len),
      cache_(cache),
      module_(model, std::move(weights), ctx,
              {.max_num_tokens = options.max_num_batched_tokens + kMaxPending * options.max_num_reqs,
               .max_num_seqs = options.max_num_reqs,
               .max_model_len = options.max_model_len}),
      hidden_size_(model.hidden_size),
      logits_(DType::f32, {options.max_num_reqs, model.vocab_size}, ctx.device),
      num_filled_(static_cast<std::size_t>(cache.k.shape[0]), 0) {}

void Drafter::add_token(std::int32_t token_id, int position, int hidden_row, std::span<const std::int32_t> blocks) {
  pass_.input_ids.push_back(token_id);
  pass_.hidden_rows.push_back(hidden_row);
  pass_.positions.push_back(position);
  pass_.slot_mapping.push_back(std::int64_t{blocks[static_cast<std::size_t>(position / block_size_)]} * block_size_ +
                               position % block_size_);
}

void Drafter::look_up(BatchRow& row, std::span<const std::int32_t> blocks) const {
  const int num_pending = static_cast<int>(static_cast<std::int64_t>(row.pending_hidden.size()) / hidden_size_);
  if (row.num_drafted_tokens >= 0) {
    // A step that was not sampled left no hidden states.
    row.has_draft_gap = row.has_draft_gap || row.num_drafted_tokens + num_pending != row.num_computed_tokens;
    return;
  }
  row.num_drafted_tokens = row.num_computed_tokens;
  for (int i = 0; i < row.num_computed_tokens / block_size_; ++i) {
    const auto block = static_cast<std::size_t>(blocks[static_cast<std::size_t>(i)]);
    row.has_draft_gap = row.has_draft_gap || num_filled_[block] < block_size_;
  }
}

void Drafter::skip(BatchRow& row, int end, const float* hidden, std::span<const std::int32_t> blocks) {
  for (int position = row.num_computed_tokens; position < end; ++position) {
    int& filled = num_filled_[static_cast<std::size_t>(blocks[static_cast<std::size_t>(position / block_size_)])];
    filled = std::min(filled, position % block_size_);
  }
  if (row.has_draft_gap) return;
  const std::int64_t num_new = std::max(end - row.num_computed_tokens, 0);
  row.has_draft_gap = end - row.num_drafted_tokens > kMaxPending;
  if (row.has_draft_gap)
    row.pending_hidden = {};
  else
    row.pending_hidden.insert(row.pending_hidden.end(), hidden, hidden + num_new * hidden_size_);
}

void Drafter::run(const StepPlan& plan, const TensorView& hidden_states, const BlockTable& block_table,
                  InputBatch& batch, ModelRunnerOutput& output) {
  output.draft_token_ids.assign(static_cast<std::size_t>(plan.num_rows), {});
  const TensorView table = block_table.view(plan.num_rows);
  pass_.clear(), drafting_.clear(), last_rows_.clear(), joined_hidden_.clear();
  pass_.begin_rows();
  const auto* const step_hidden = hidden_states.as<float>();
  int num_pending = 0;  // of all rows so far
  for (int i = 0; i < plan.num_rows; ++i) {
    BatchRow& row = batch.row(i);
    const std::span<const std::int32_t> blocks = block_table.row(i);
    look_up(row, blocks);
    // The token behind a position must be known: of a step that sampled, all positions up to the newest token.
    const int end = std::min(row.seq_len(), row.num_tokens() - 1);
    const int first_row = plan.inputs.query_start_loc[static_cast<std::size_t>(i)];
    if (plan.num_drafts == 0 || row.has_draft_gap) {
      skip(row, end, step_hidden + first_row * hidden_size_, blocks);
      pass_.end_row(end);
      continue;
    }
    // Rows of the step stand behind all pending ones: counted from the end, below 0, until their number is known.
    for (int position = row.num_drafted_tokens; position < end; ++position) {
      const bool is_pending = position < row.num_computed_tokens;
      const int hidden_row = is_pending ? num_pending++ : -1 - (first_row + position - row.num_computed_tokens);
      add_token(row.token_ids[static_cast<std::size_t>(position) + 1], position, hidden_row, blocks);
      num_filled_[static_cast<std::size_t>(blocks[static_cast<std::size_t>(position / block_size_)])] =
          position % block_size_ + 1;
    }
    joined_hidden_.insert(joined_hidden_.end(), row.pending_hidden.begin(), row.pending_hidden.end());
    row.pending_hidden.clear();
    row.num_drafted_tokens = std::max(row.num_drafted_tokens, end);
    pass_.end_row(end);
    if (output.sampled_token_ids[static_cast<std::size_t>(i)].empty()) continue;
    if (row.num_tokens() >= max_model_len_) continue;
    drafting_.push_back(i);
    last_rows_.push_back(pass_.query_start_loc.back() - 1);
  }
  if (pass_.input_ids.empty()) return;
  for (std::int32_t& row : pass_.hidden_rows)
    if (row < 0) row = num_pending - 1 - row;
  TensorView all_hidden = hidden_states;
  if (num_pending > 0) {
    joined_hidden_.insert(joined_hidden_.end(), step_hidden, step_hidden + hidden_states.numel());
    all_hidden = make_view(joined_hidden_.data(), DType::f32, {num_pending + hidden_states.shape[0], hidden_size_});
  }
  TensorView hidden = forward(all_hidden, table);
  choose(hidden, batch);
  for (int step = 1; step < plan.num_drafts && !drafting_.empty(); ++step) {
    pass_.clear();
    pass_.begin_rows();
    std::vector<int> still_drafting;
    std::vector<std::int32_t> last_rows;
    auto next = drafting_.begin();
    for (int i = 0; i < plan.num_rows; ++i) {
      const BatchRow& row = batch.row(i);
      const int position = row.num_tokens() - 2 + step;  // in front of the newest draft
      const bool runs = next != drafting_.end() && *next == i;
      const auto hidden_row = runs ? last_rows_[static_cast<std::size_t>(next++ - drafting_.begin())] : 0;
      if (runs && position < block_table.num_blocks(i) * block_size_ && row.num_tokens() + step < max_model_len_) {
        add_token(row.draft_token_ids.back(), position, hidden_row, block_table.row(i));
        still_drafting.push_back(i);
        last_rows.push_back(static_cast<std::int32_t>(pass_.input_ids.size()) - 1);
      }
      pass_.end_row(position + 1);
    }
    drafting_ = std::move(still_drafting);
    last_rows_ = std::move(last_rows);
    hidden = forward(hidden, table);
    choose(hidden, batch);
  }
  for (int i = 0; i < plan.num_rows; ++i)
    output.draft_token_ids[static_cast<std::size_t>(i)] = batch.row(i).draft_token_ids;
}

TensorView Drafter::forward(const TensorView& hidden_states, const TensorView& block_table) {
  const auto num_tokens = static_cast<std::int64_t>(pass_.input_ids.size());
  const ForwardInputs inputs{.input_ids = view_of(pass_.input_ids, DType::i32),
                             .positions = view_of(pass_.positions, DType::i64).reshape({1, num_tokens}),
                             .query_start_loc = view_of(pass_.query_start_loc, DType::i32),
                             .seq_lens = view_of(pass_.seq_lens, DType::i32),
                             .block_table = block_table,
                             .slot_mapping = view_of(pass_.slot_mapping, DType::i64),
                             .gdn = {}};
  return module_.forward(inputs, hidden_states, view_of(pass_.hidden_rows, DType::i32), cache_);
}

void Drafter::choose(const TensorView& hidden, InputBatch& batch) {
  if (drafting_.empty()) return;
  const auto num_rows = static_cast<std::int64_t>(drafting_.size());
  const TensorView logits = logits_.view().slice(0, num_rows);
  module_.compute_logits(hidden, view_of(last_rows_, DType::i32), logits);

  std::vector<ops::SamplerRow> rows;
  std::vector<SamplingParams> params(drafting_.size());
  std::vector<std::vector<std::int32_t>> outputs(drafting_.size());
  for (std::size_t i = 0; i < drafting_.size(); ++i) {
    const BatchRow& row = batch.row(drafting_[i]);
    params[i] = row.sampling_params;
    params[i].logprobs.reset();
    outputs[i].assign(row.output_token_ids().begin(), row.output_token_ids().end());
    outputs[i].insert(outputs[i].end(), row.draft_token_ids.begin(), row.draft_token_ids.end());
    const auto index = static_cast<std::int64_t>(i);
    rows.push_back({.logits = logits.slice(index, index + 1).reshape({vocab_size_}),
                    .params = &params[i],
                    .prompt_token_ids = row.prompt_token_ids(),
                    .output_token_ids = outputs[i],
                    .seed = row.seed});
  }
  const std::vector<ops::SampledToken> tokens = ops::sample(ctx_, rows);
  std::size_t num_kept = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].is_finite) continue;
    batch.row(drafting_[i]).draft_token_ids.push_back(tokens[i].token_id);
    drafting_[num_kept] = drafting_[i];
    last_rows_[num_kept++] = last_rows_[i];
  }
  drafting_.resize(num_kept), last_rows_.resize(num_kept);
}

}  // namespace deltaic

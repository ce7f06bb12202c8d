#include "cpp/src/runner/sampling.h"

#include <algorithm>
#include <utility>

namespace deltaic {

StepSampler::StepSampler(int vocab_size, int max_num_rows, const ops::Context& ctx)
    : ctx_(ctx),
      vocab_size_(vocab_size),
      max_num_rows_(max_num_rows),
      logits_(DType::f32, {max_num_rows, vocab_size}, ctx.device) {}

namespace {

TensorView view_of(std::vector<std::int32_t>& rows) {
  return make_view(rows.data(), DType::i32, {static_cast<std::int64_t>(rows.size())});
}

}  // namespace

ModelRunnerOutput StepSampler::sample(HybridDecoder& decoder, const TensorView& hidden_states, const StepInputs& inputs,
                                      int num_rows, InputBatch& batch) {
  ModelRunnerOutput output;
  output.sampled_token_ids.resize(static_cast<std::size_t>(num_rows));
  hidden_rows_.clear(), sampled_rows_.clear(), draft_rows_.clear();
  for (int i = 0; i < num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    output.req_ids.push_back(row.req_id);
    output.req_id_to_index.emplace(row.req_id, i);
    if (row.sampling_params.prompt_logprobs &&
        !add_prompt_logprobs(decoder, hidden_states, inputs.query_start_loc[static_cast<std::size_t>(i)], row,
                             output)) {
      output.failed_req_ids.push_back(row.req_id);
      continue;
    }
    if (row.is_partial_prefill()) continue;
    sampled_rows_.push_back(i);
  }
  if (sampled_rows_.empty()) return output;

  // Each row has its drafts behind its tokens while they are verified.
  hidden_rows_.clear();
  for (const int i : sampled_rows_) {
    BatchRow& row = batch.row(i);
    row.token_ids.insert(row.token_ids.end(), row.scheduled_draft_ids.begin(), row.scheduled_draft_ids.end());
    for (int j = 0; j <= row.num_draft_tokens; ++j)
      hidden_rows_.push_back(inputs.logits_indices[static_cast<std::size_t>(i)] - row.num_draft_tokens + j);
  }
  const TensorView step_logits = logits(static_cast<std::int64_t>(hidden_rows_.size()));
  decoder.compute_logits(hidden_states, view_of(hidden_rows_), step_logits);
  std::int64_t first_logits = 0;
  for (const int i : sampled_rows_) {
    const BatchRow& row = batch.row(i);
    const std::int64_t end_logits = first_logits + 1 + row.num_draft_tokens;
    draft_rows_.push_back({.logits = step_logits.slice(first_logits, end_logits),
                           .params = &row.sampling_params,
                           .prompt_token_ids = row.prompt_token_ids(),
                           .output_token_ids = row.output_token_ids(),
                           .num_drafts = row.num_draft_tokens,
                           .seed = row.seed});
    first_logits = end_logits;
  }

  std::vector<ops::VerifiedTokens> results = ops::verify_drafts(ctx_, draft_rows_);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const int index = sampled_rows_[i];
    BatchRow& row = batch.row(index);
    row.token_ids.resize(row.token_ids.size() - row.scheduled_draft_ids.size());
    if (!results[i].is_finite) {
      output.failed_req_ids.push_back(row.req_id);
      continue;
    }
    row.was_sampled = true;
    for (const std::int32_t token_id : results[i].token_ids) batch.append_sampled_token(index, token_id);
    output.sampled_token_ids[static_cast<std::size_t>(index)] = std::move(results[i].token_ids);
    if (row.sampling_params.logprobs) output.logprobs[row.req_id] = std::move(results[i].logprobs);
  }
  return output;
}

bool StepSampler::add_prompt_logprobs(HybridDecoder& decoder, const TensorView& hidden_states, int first_hidden_row,
                                      const BatchRow& row, ModelRunnerOutput& output) {
  // The logits of a position are about the token behind it, so the last prompt position has no entry.
  const int end = std::min(row.seq_len(), row.num_prompt_tokens - 1);
  for (int begin = row.num_computed_tokens; begin < end; begin += max_num_rows_) {
    const int count = std::min(max_num_rows_, end - begin);
    hidden_rows_.clear();
    for (int i = 0; i < count; ++i) hidden_rows_.push_back(first_hidden_row + begin - row.num_computed_tokens + i);
    const TensorView chunk = logits(count);
    decoder.compute_logits(hidden_states, view_of(hidden_rows_), chunk);
    const std::span<const std::int32_t> tokens(row.token_ids.data() + begin + 1, static_cast<std::size_t>(count));
    for (auto& entry : ops::token_logprobs(ctx_, chunk, tokens, row.sampling_params.prompt_logprobs.value_or(0))) {
      if (!entry) return false;
      output.prompt_logprobs[row.req_id].push_back(*std::move(entry));
    }
  }
  return true;
}

}  // namespace deltaic

#include "cpp/src/runner/attention_metadata.h"

#include <algorithm>
#include <numeric>

namespace deltaic {

void build_step_inputs(const InputBatch& batch, int num_rows, bool use_last_sampled, StepInputs& inputs) {
  inputs.query_start_loc.resize(static_cast<std::size_t>(num_rows) + 1);
  inputs.logits_indices.resize(static_cast<std::size_t>(num_rows));
  inputs.query_start_loc[0] = 0;
  for (int i = 0; i < num_rows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    inputs.query_start_loc[row + 1] = inputs.query_start_loc[row] + batch.row(i).num_scheduled_tokens;
    inputs.logits_indices[row] = inputs.query_start_loc[row + 1] - 1;
  }
  const auto num_tokens = static_cast<std::size_t>(inputs.query_start_loc.back());
  inputs.input_token_ids.resize(num_tokens);
  inputs.positions.resize(num_tokens);

  for (int i = 0; i < num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    const auto start = static_cast<std::ptrdiff_t>(inputs.query_start_loc[static_cast<std::size_t>(i)]);
    const auto positions = inputs.positions.begin() + start;
    std::iota(positions, positions + row.num_scheduled_tokens, std::int64_t{row.num_computed_tokens});

    const int num_own = row.num_scheduled_tokens - row.num_draft_tokens;
    const int num_known = std::clamp(row.num_tokens() - row.num_computed_tokens, 0, num_own);
    const auto ids = inputs.input_token_ids.begin() + start;
    std::copy_n(row.token_ids.begin() + std::min(row.num_computed_tokens, row.num_tokens()), num_known, ids);
    std::fill(ids + num_known, ids + num_own, 0);
    if (use_last_sampled && row.num_computed_tokens + num_own > row.prefill_length)
      ids[num_own - 1] = batch.last_sampled_tokens()[static_cast<std::size_t>(i)];
    for (int j = 0; j < row.num_draft_tokens; ++j)
      ids[num_own + j] = std::max(row.scheduled_draft_ids[static_cast<std::size_t>(j)], 0);
  }
}

void build_attention_metadata(const InputBatch& batch, int num_rows, int group, int block_size,
                              AttentionMetadataView& metadata) {
  const BlockTable& table = batch.block_table(group);
  metadata.block_table_row_stride = table.row_stride();
  metadata.seq_lens.resize(static_cast<std::size_t>(num_rows));
  metadata.slot_mapping.clear();
  for (int i = 0; i < num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    const std::span<const std::int32_t> blocks = table.row(i);
    metadata.seq_lens[static_cast<std::size_t>(i)] = row.seq_len();
    for (int position = row.num_computed_tokens; position < row.seq_len();) {
      const int block = position / block_size;
      const int block_end = std::min((block + 1) * block_size, row.seq_len());
      const std::int64_t base = std::int64_t{blocks[static_cast<std::size_t>(block)]} * block_size;
      for (; position < block_end; ++position) metadata.slot_mapping.push_back(base + position % block_size);
    }
  }
}

}  // namespace deltaic

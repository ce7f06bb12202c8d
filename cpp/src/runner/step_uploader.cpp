#include "cpp/src/runner/step_uploader.h"

#include <algorithm>

#include "cpp/src/runner/step_kernels.h"

namespace deltaic {

namespace {

StepSizes largest(const StepUploader::Limits& limits, const StateCopier& copier) {
  return {.num_tokens = limits.max_num_tokens,
          .num_rows = limits.max_num_reqs,
          .num_samples = limits.max_num_reqs,
          .num_copies = 2 * limits.max_num_reqs * copier.num_states()};
}

std::size_t with_alignment(std::size_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

// The arrays, the tokens, and what the kernel needs to know of the blocks.
std::size_t num_staging_bytes(const StepSizes& sizes, std::size_t num_new_blocks) {
  const auto tokens = static_cast<std::size_t>(sizes.num_tokens), rows = static_cast<std::size_t>(sizes.num_rows);
  return StepArrays::at(nullptr, sizes).num_bytes + with_alignment(tokens * 4) + (3 * rows + 1 + num_new_blocks) * 4;
}

}  // namespace

StepUploader::StepUploader(const Limits& limits, const StateCopier& copier, Device device)
    : limits_(limits),
      copier_(copier),
      device_(device),
      arrays_memory_(StepArrays::at(nullptr, largest(limits, copier)).num_bytes, device),
      input_ids_(DType::i32, {limits.max_num_tokens}, device),
      block_table_(DType::i32, {limits.max_num_reqs, limits.block_table_row_stride}, device),
      slot_tables_(DType::i32, {limits.max_num_reqs, limits.block_table_row_stride}, device),
      last_sampled_(DType::i32, {limits.max_num_reqs}, device) {
  // Enough for all but steps that start many long requests with cached prefixes: memory that is pinned later stalls.
  StepSizes sizes = largest(limits, copier);
  sizes.num_copies = 8 * copier.num_states();
  const auto tokens = static_cast<std::size_t>(limits.max_num_tokens);
  for (Staging& staging : stagings_)
    staging.memory =
        cuda::PinnedBuffer(num_staging_bytes(sizes, tokens + static_cast<std::size_t>(limits.block_table_row_stride)));
}

void StepUploader::count(const StepPlan& plan, const InputBatch& batch, int group, int num_rows) {
  sampled_rows_.clear();
  num_new_blocks_ = 0, max_query_len_ = 0, max_seq_len_ = 1;
  for (int i = 0; i < plan.num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    if (!row.is_partial_prefill()) sampled_rows_.push_back(i);
    num_new_blocks_ += batch.block_table(group).num_blocks(i) - row.num_uploaded_blocks;
    if (i >= plan.num_decodes) max_query_len_ = std::max(max_query_len_, row.num_scheduled_tokens);
    max_seq_len_ = std::max(max_seq_len_, row.seq_len());
  }
  const int num_padding = num_rows - plan.num_rows;
  num_decodes_ = plan.num_decodes + num_padding;
  num_copies_before_ = static_cast<int>(plan.copies_before.size()) * copier_.num_states();
  const int num_copies_after = static_cast<int>(plan.copies_after.size()) * copier_.num_states();
  sizes_ = {.num_tokens = plan.inputs.query_start_loc.back() + num_padding,
            .num_rows = num_rows,
            .num_samples = static_cast<int>(sampled_rows_.size()) + num_padding,
            .num_copies = num_copies_before_ + num_copies_after};
}

// Without the tokens and the blocks, which the kernel does not take as they are.
void StepUploader::fill(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch) const {
  const StepInputs& inputs = plan.inputs;
  const int num_real_tokens = inputs.query_start_loc.back();
  std::fill_n(std::copy(inputs.positions.begin(), inputs.positions.end(), arrays.positions),
              sizes_.num_tokens - num_real_tokens, 0);
  std::fill_n(std::copy(plan.attention.slot_mapping.begin(), plan.attention.slot_mapping.end(), arrays.slot_mapping),
              sizes_.num_tokens - num_real_tokens, -1);
  std::copy(inputs.query_start_loc.begin(), inputs.query_start_loc.end(), arrays.query_start_loc);
  std::copy(plan.attention.seq_lens.begin(), plan.attention.seq_lens.end(), arrays.seq_lens);
  if (copier_.num_states() > 0) {
    std::copy(plan.gdn.view.state_indices.begin(), plan.gdn.view.state_indices.end(), arrays.state_indices);
    std::copy(plan.gdn.has_initial_state.begin(), plan.gdn.has_initial_state.end(), arrays.has_initial_state);
  }
  int sample = 0;
  for (const int i : sampled_rows_) {
    const BatchRow& row = batch.row(i);
    arrays.logits_indices[sample] = inputs.logits_indices[static_cast<std::size_t>(i)];
    arrays.sample_slots[sample] = row.slot;
    arrays.output_positions[sample++] = row.num_output_tokens();
  }
  for (int i = plan.num_rows; i < sizes_.num_rows; ++i, ++sample) {
    const int token = num_real_tokens + i - plan.num_rows;
    arrays.query_start_loc[i + 1] = token + 1;
    arrays.seq_lens[i] = 1;
    arrays.state_indices[i] = -1;
    arrays.has_initial_state[i] = 0;
    arrays.logits_indices[sample] = token;
    arrays.sample_slots[sample] = -1;
    arrays.output_positions[sample] = 0;
  }
  int copy = 0;
  for (const auto* copies : {&plan.copies_before, &plan.copies_after})
    for (const SlotCopy& slots : *copies) {
      copier_.write(slots.from, slots.to, arrays.copy_sources + copy, arrays.copy_destinations + copy,
                    arrays.copy_sizes + copy);
      copy += copier_.num_states();
    }
}

void StepUploader::upload(const cuda::Stream& stream, const StepPlan& plan, InputBatch& batch, int group,
                          int num_rows) {
  count(plan, batch, group, num_rows);
  const auto tokens = static_cast<std::size_t>(sizes_.num_tokens), rows = static_cast<std::size_t>(num_rows);
  const std::size_t array_bytes = StepArrays::at(nullptr, sizes_).num_bytes;
  const std::size_t num_bytes = num_staging_bytes(sizes_, static_cast<std::size_t>(num_new_blocks_));

  Staging& staging = stagings_[turn_++ % stagings_.size()];
  staging.was_read.wait();
  if (staging.memory.num_bytes() < num_bytes) staging.memory = cuda::PinnedBuffer(num_bytes + num_bytes / 2);
  std::byte* const memory = staging.memory.data();
  fill(StepArrays::at(memory, sizes_), plan, batch);
  auto* ids = reinterpret_cast<std::int32_t*>(memory + array_bytes);
  auto* row_slots = reinterpret_cast<std::int32_t*>(memory + array_bytes + with_alignment(tokens * 4));
  auto *num_known = row_slots + rows, *new_begin = num_known + rows, *new_blocks = new_begin + rows + 1;

  const StepInputs& inputs = plan.inputs;
  std::fill(std::copy(inputs.input_token_ids.begin(), inputs.input_token_ids.end(), ids), ids + tokens, 0);
  new_begin[0] = 0;
  for (int i = 0; i < num_rows; ++i) {
    row_slots[i] = -1, num_known[i] = 0, new_begin[i + 1] = new_begin[i];
    if (i >= plan.num_rows) continue;
    BatchRow& row = batch.row(i);
    for (int t = inputs.query_start_loc[static_cast<std::size_t>(i)];
         t <= inputs.logits_indices[static_cast<std::size_t>(i)]; ++t)
      if (ids[t] < 0) ids[t] = ~row.slot;
    const auto blocks = batch.block_table(group).row(i);
    row_slots[i] = row.slot, num_known[i] = row.num_uploaded_blocks;
    std::copy(blocks.begin() + row.num_uploaded_blocks, blocks.end(), new_blocks + new_begin[i]);
    new_begin[i + 1] += static_cast<int>(blocks.size()) - row.num_uploaded_blocks;
    row.num_uploaded_blocks = static_cast<int>(blocks.size());
  }

  auto* const target = static_cast<std::byte*>(arrays_memory_.data());
  device_arrays_ = StepArrays::at(target, sizes_);
  cuda::upload_step({stream.handle()}, {.source = memory,
                                        .target = target,
                                        .num_bytes = static_cast<std::int64_t>(array_bytes),
                                        .source_ids = ids,
                                        .input_ids = input_ids_.as<std::int32_t>(),
                                        .last_sampled = last_sampled_.as<std::int32_t>(),
                                        .num_tokens = sizes_.num_tokens,
                                        .row_slots = row_slots,
                                        .num_known = num_known,
                                        .new_begin = new_begin,
                                        .new_blocks = new_blocks,
                                        .slot_tables = slot_tables_.as<std::int32_t>(),
                                        .block_table = block_table_.as<std::int32_t>(),
                                        .row_stride = limits_.block_table_row_stride,
                                        .num_rows = num_rows});
  staging.was_read.record(stream);
}

ForwardInputs StepUploader::inputs() const {
  const std::int64_t rows = sizes_.num_rows, tokens = sizes_.num_tokens;
  ForwardInputs inputs{.input_ids = input_ids_.view().slice(0, tokens),
                       .positions = view(device_arrays_.positions, DType::i64, {1, tokens}),
                       .query_start_loc = view(device_arrays_.query_start_loc, DType::i32, {rows + 1}),
                       .seq_lens = view(device_arrays_.seq_lens, DType::i32, {rows}),
                       .block_table = block_table_.view().slice(0, rows),
                       .slot_mapping = view(device_arrays_.slot_mapping, DType::i64, {tokens}),
                       .gdn = {},
                       .num_decodes = num_decodes_,
                       .max_query_len = max_query_len_,
                       .max_seq_len = max_seq_len_};
  if (copier_.num_states() > 0)
    inputs.gdn = {.query_start_loc = inputs.query_start_loc,
                  .state_indices = view(device_arrays_.state_indices, DType::i32, {rows}),
                  .has_initial_state = view(device_arrays_.has_initial_state, DType::u8, {rows}),
                  .num_decodes = num_decodes_};
  return inputs;
}

TensorView StepUploader::logits_indices() const {
  return view(device_arrays_.logits_indices, DType::i32, {sizes_.num_samples});
}
TensorView StepUploader::sample_slots() const {
  return view(device_arrays_.sample_slots, DType::i32, {sizes_.num_samples});
}
TensorView StepUploader::output_positions() const {
  return view(device_arrays_.output_positions, DType::i32, {sizes_.num_samples});
}

std::array<TensorView, 3> StepUploader::copies(int begin, int end) const {
  const auto part = [&](std::int64_t* array) { return view(array + begin, DType::i64, {end - begin}); };
  return {part(device_arrays_.copy_sources), part(device_arrays_.copy_destinations), part(device_arrays_.copy_sizes)};
}

}  // namespace deltaic

#include "cpp/src/runner/step_uploader.h"

#include <algorithm>

#include "cpp/src/runner/step_kernels.h"

namespace deltaic {

namespace {

StepSizes largest(const StepUploader::Limits& limits, const StateCopier& copier) {
  return {.num_tokens = limits.max_num_tokens,
          .num_rows = limits.max_num_reqs,
          .num_samples = limits.max_num_reqs * (1 + limits.num_speculative_tokens),
          .num_copies = 2 * limits.max_num_reqs * copier.num_states(),
          .with_drafts = limits.num_speculative_tokens > 0};
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
      kept_tokens_(DType::i32, {1 + limits.num_speculative_tokens, limits.max_num_reqs}, device) {
  if (limits.num_speculative_tokens > 0) token_ids_ = Tensor(DType::i32, {limits.max_num_tokens}, device);
  // Enough for all but steps that start many long requests with cached prefixes: memory that is pinned later stalls.
  StepSizes sizes = largest(limits, copier);
  sizes.num_copies = 8 * copier.num_states();
  const auto tokens = static_cast<std::size_t>(limits.max_num_tokens);
  for (Staging& staging : stagings_)
    staging.memory =
        cuda::PinnedBuffer(num_staging_bytes(sizes, tokens + static_cast<std::size_t>(limits.block_table_row_stride)));
}

void StepUploader::count(const StepPlan& plan, const InputBatch& batch, int group, Frame frame) {
  sampled_rows_.clear();
  num_new_blocks_ = 0, max_query_len_ = 0, max_seq_len_ = 1, decode_query_len_ = std::max(frame.query_len, 1);
  int num_samples = 0;
  for (int i = 0; i < plan.num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    if (!row.is_partial_prefill()) {
      sampled_rows_.push_back(i);
      num_samples += 1 + row.num_draft_tokens;
    }
    num_new_blocks_ += batch.block_table(group).num_blocks(i) - row.num_uploaded_blocks;
    int& longest = i < plan.num_decodes ? decode_query_len_ : max_query_len_;
    longest = std::max(longest, row.num_scheduled_tokens);
    max_seq_len_ = std::max(max_seq_len_, row.seq_len());
  }
  const int num_padding = frame.num_rows - plan.num_rows, num_framed = frame.num_rows * frame.query_len;
  num_decodes_ = plan.num_decodes + num_padding;
  num_copies_before_ = static_cast<int>(plan.copies_before.size()) * copier_.num_states();
  const int num_copies_after = static_cast<int>(plan.copies_after.size()) * copier_.num_states();
  sizes_ = {.num_tokens = num_framed > 0 ? num_framed : plan.inputs.query_start_loc.back() + num_padding,
            .num_rows = frame.num_rows,
            .num_samples = num_framed > 0 ? num_framed : num_samples + num_padding,
            .num_copies = num_copies_before_ + num_copies_after,
            .with_drafts = limits_.num_speculative_tokens > 0};
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
  for (int i = plan.num_rows; i < sizes_.num_rows; ++i) {
    arrays.query_start_loc[i + 1] = num_real_tokens + i - plan.num_rows + 1;
    arrays.seq_lens[i] = 1;
    arrays.state_indices[i] = -1;
    arrays.has_initial_state[i] = 0;
  }
  fill_samples(arrays, plan, batch);
  int copy = 0;
  for (const auto* copies : {&plan.copies_before, &plan.copies_after})
    for (const SlotCopy& slots : *copies) {
      copier_.write(slots.from, slots.to, arrays.copy_sources + copy, arrays.copy_destinations + copy,
                    arrays.copy_sizes + copy);
      copy += copier_.num_states();
    }
}

// A row of padding samples, if anything does, from its own token; so does what a frame has beyond all rows.
void StepUploader::fill_samples(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch) const {
  int sample = 0;
  for (const int i : sampled_rows_) {
    const BatchRow& row = batch.row(i);
    for (int j = 0; j <= row.num_draft_tokens; ++j, ++sample) {
      arrays.logits_indices[sample] =
          plan.inputs.logits_indices[static_cast<std::size_t>(i)] - row.num_draft_tokens + j;
      arrays.sample_slots[sample] = row.slot;
      arrays.output_positions[sample] = row.num_output_tokens() + j;
      if (sizes_.with_drafts) arrays.num_context[sample] = j;
    }
  }
  for (int token = plan.inputs.query_start_loc.back(); sample < sizes_.num_samples; ++token, ++sample) {
    arrays.logits_indices[sample] = token;
    arrays.sample_slots[sample] = -1;
    arrays.output_positions[sample] = 0;
    if (sizes_.with_drafts) arrays.num_context[sample] = 0;
  }
}

void StepUploader::fill_draft_rows(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch,
                                   int group) const {
  int sample = 0;
  for (int i = 0; i < sizes_.num_rows; ++i) {
    arrays.row_slots[i] = arrays.first_samples[i] = arrays.next_ids[i] = -1;
    arrays.snapshot_slots[i] = arrays.snapshot_offsets[i] = -1;
    arrays.num_rejected[i] = arrays.capacities[i] = 0;
    arrays.num_accepted[i] = 1;
    if (i >= plan.num_rows) continue;
    const BatchRow& row = batch.row(i);
    arrays.row_slots[i] = row.slot;
    arrays.num_rejected[i] = row.num_uploaded_blocks == 0 ? -1 : row.num_rejected_drafts;
    arrays.capacities[i] = batch.block_table(group).num_blocks(i) * limits_.block_size;
    arrays.num_accepted[i] = i >= plan.num_decodes ? 0 : row.may_begin_earlier() ? -1 : row.num_accepted_tokens;
    if (copier_.num_states() > 0) {
      arrays.snapshot_slots[i] = plan.gdn.snapshot_slots[static_cast<std::size_t>(i)];
      arrays.snapshot_offsets[i] = plan.gdn.snapshot_offsets[static_cast<std::size_t>(i)];
    }
    if (row.is_partial_prefill()) {
      arrays.next_ids[i] = std::max(row.token_ids[static_cast<std::size_t>(row.seq_len())], -1);
    } else {
      arrays.first_samples[i] = sample;
      sample += 1 + row.num_draft_tokens;
    }
  }
}

// The tokens of a row that the host does not know become references to what the device keeps.
void StepUploader::refer_to_kept_tokens(const StepPlan& plan, const BatchRow& row, int index, std::int32_t* ids) const {
  const int end = plan.inputs.logits_indices[static_cast<std::size_t>(index)] + 1,
            first_draft = end - row.num_draft_tokens;
  for (int t = plan.inputs.query_start_loc[static_cast<std::size_t>(index)]; t < first_draft; ++t)
    if (ids[t] < 0) ids[t] = ~row.slot;
  for (int j = 0; j < row.num_draft_tokens; ++j) {
    const std::int32_t draft = row.scheduled_draft_ids[static_cast<std::size_t>(j)];
    const bool is_kept = limits_.takes_own_drafts && row.follows_sample;
    ids[first_draft + j] = draft >= 0 ? draft
                           : is_kept  ? ~((1 + j) * limits_.max_num_reqs + row.slot)
                                      : cuda::StepUpload::kNoToken;
  }
}

void StepUploader::upload(const cuda::Stream& stream, const StepPlan& plan, InputBatch& batch, int group, Frame frame) {
  count(plan, batch, group, frame);
  const int num_rows = frame.num_rows;
  const auto tokens = static_cast<std::size_t>(sizes_.num_tokens), rows = static_cast<std::size_t>(num_rows);
  const std::size_t array_bytes = StepArrays::at(nullptr, sizes_).num_bytes;
  const std::size_t num_bytes = num_staging_bytes(sizes_, static_cast<std::size_t>(num_new_blocks_));

  Staging& staging = stagings_[turn_++ % stagings_.size()];
  staging.was_read.wait();
  if (staging.memory.num_bytes() < num_bytes) staging.memory = cuda::PinnedBuffer(num_bytes + num_bytes / 2);
  std::byte* const memory = staging.memory.data();
  const StepArrays host_arrays = StepArrays::at(memory, sizes_);
  fill(host_arrays, plan, batch);
  if (sizes_.with_drafts) fill_draft_rows(host_arrays, plan, batch, group);
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
    refer_to_kept_tokens(plan, row, i, ids);
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
                                        .token_ids = sizes_.with_drafts ? token_ids_.as<std::int32_t>() : nullptr,
                                        .kept_tokens = kept_tokens_.as<std::int32_t>(),
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
                       .max_decode_query_len = decode_query_len_,
                       .max_query_len = max_query_len_,
                       .max_seq_len = max_seq_len_};
  if (copier_.num_states() > 0)
    inputs.gdn = {.query_start_loc = inputs.query_start_loc,
                  .state_indices = view(device_arrays_.state_indices, DType::i32, {rows}),
                  .has_initial_state = view(device_arrays_.has_initial_state, DType::u8, {rows}),
                  .num_decodes = num_decodes_};
  if (sizes_.with_drafts && copier_.num_states() > 0) {
    inputs.gdn.num_accepted = view(device_arrays_.num_accepted, DType::i32, {rows});
    inputs.gdn.num_draft_tokens = limits_.num_speculative_tokens;
    inputs.gdn.snapshot_slots = view(device_arrays_.snapshot_slots, DType::i32, {rows});
    inputs.gdn.snapshot_offsets = view(device_arrays_.snapshot_offsets, DType::i32, {rows});
  }
  return inputs;
}

TensorView StepUploader::logits_indices() const {
  return view(device_arrays_.logits_indices, DType::i32, {sizes_.num_samples});
}
TensorView StepUploader::sample_slots() const {
  return view(device_arrays_.sample_slots, DType::i32, {sizes_.num_samples});
}
TensorView StepUploader::num_context() const {
  return view(device_arrays_.num_context, DType::i32, {sizes_.num_samples});
}
TensorView StepUploader::output_positions() const {
  return view(device_arrays_.output_positions, DType::i32, {sizes_.num_samples});
}

std::array<TensorView, 3> StepUploader::copies(int begin, int end) const {
  const auto part = [&](std::int64_t* array) { return view(array + begin, DType::i64, {end - begin}); };
  return {part(device_arrays_.copy_sources), part(device_arrays_.copy_destinations), part(device_arrays_.copy_sizes)};
}

}  // namespace deltaic

#include "cpp/src/runner/gdn_metadata.h"

#include "cpp/src/check.h"
#include "cpp/src/ops/gated_delta_net.h"

namespace deltaic {

void validate_gdn_state_indices(std::span<const std::int32_t> indices, int required, int num_slots) {
  DELTAIC_CHECK(required >= 0 && indices.size() >= static_cast<std::size_t>(required),
                "GDN state indices: ", indices.size(), " entries, ", required, " rows need one; row ", indices.size(),
                " has none");
  constexpr int kNoRow = -1;
  std::vector<int> owner(static_cast<std::size_t>(num_slots > 0 ? num_slots : 0), kNoRow);
  for (std::size_t row = 0; row < indices.size(); ++row) {
    const std::int32_t index = indices[row];
    if (index == -1) continue;
    DELTAIC_CHECK(index >= 0, "GDN state index of row ", row, " is ", index,
                  "; the only negative index is -1, for padding");
    DELTAIC_CHECK(index < num_slots, "GDN state index of row ", row, " is ", index, ", but there are ", num_slots,
                  " slots");
    int& first = owner[static_cast<std::size_t>(index)];
    DELTAIC_CHECK(first == kNoRow, "GDN state index of row ", row, " is ", index, ", which row ", first, " has too");
    first = static_cast<int>(row);
  }
}

void build_gdn_metadata(const InputBatch& batch, int num_rows, int num_decodes, bool with_speculation,
                        std::span<const std::int32_t> query_start_loc, int num_slots, GdnMetadata& metadata) {
  GdnMetadataView& view = metadata.view;
  const int first_prefill_token = query_start_loc[static_cast<std::size_t>(num_decodes)];
  view.num_spec_decodes = view.num_spec_decode_tokens = 0;
  for (int i = 0; i < num_decodes; ++i)
    if (const BatchRow& row = batch.row(i); row.num_draft_tokens > 0) {
      ++view.num_spec_decodes;
      view.num_spec_decode_tokens += row.num_scheduled_tokens;
    }
  view.num_decodes = num_decodes - view.num_spec_decodes;
  view.num_prefills = num_rows - num_decodes;
  view.num_decode_tokens = first_prefill_token - view.num_spec_decode_tokens;
  view.num_prefill_tokens = query_start_loc[static_cast<std::size_t>(num_rows)] - first_prefill_token;
  view.state_indices.clear();
  view.has_initial_state.clear();
  view.num_accepted_tokens.clear();
  metadata.has_initial_state.clear();
  for (int i = 0; i < num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    const bool has_initial_state = row.num_computed_tokens > 0;
    const auto initial = !has_initial_state ? ops::InitialState::zero
                         : row.has_replay   ? ops::InitialState::replay
                                            : ops::InitialState::slot;
    view.state_indices.push_back(row.state_slot);
    view.has_initial_state.push_back(has_initial_state);
    metadata.has_initial_state.push_back(static_cast<std::uint8_t>(initial));
    if (with_speculation) view.num_accepted_tokens.push_back(i < num_decodes ? row.num_accepted_tokens : 0);
  }
  metadata.snapshot_slots.assign(with_speculation ? static_cast<std::size_t>(num_rows) : 0, -1);
  metadata.snapshot_offsets.assign(metadata.snapshot_slots.size(), -1);
  validate_gdn_state_indices(view.state_indices, num_rows, num_slots);
  view.prefill_state_indices.assign(view.state_indices.begin() + num_decodes, view.state_indices.end());
  view.prefill_query_start_loc.clear();
  for (int i = num_decodes; i <= num_rows; ++i)
    view.prefill_query_start_loc.push_back(query_start_loc[static_cast<std::size_t>(i)] - first_prefill_token);
}

}  // namespace deltaic

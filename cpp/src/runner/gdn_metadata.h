#pragma once

#include <cstdint>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/runner/input_batch.h"

namespace deltaic {

// What the GDN layers of a step need: the view that tests read, and what the ops take in a form of their own.
struct GdnMetadata {
  GdnMetadataView view;
  std::vector<std::uint8_t> has_initial_state;  // [num_rows]: ops::InitialState
  // [num_rows] with speculation, as GdnSequences has them; no snapshots until somebody enters some.
  std::vector<std::int32_t> snapshot_slots, snapshot_offsets;
};

// Of the first num_rows rows, in row order: num_decodes of them are decodes and come first, the others are prefills.
// Every row must own a state slot; the indices are validated against num_slots. With speculation all decodes are
// verified, with drafts or without: only so they start behind what was accepted.
//   query_start_loc  [num_rows + 1] of the step
void build_gdn_metadata(const InputBatch& batch, int num_rows, int num_decodes, bool with_speculation,
                        std::span<const std::int32_t> query_start_loc, int num_slots, GdnMetadata& metadata);

}  // namespace deltaic

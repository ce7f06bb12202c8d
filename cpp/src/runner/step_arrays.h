#pragma once

#include <cstddef>
#include <cstdint>

namespace deltaic {

struct StepSizes {
  int num_tokens = 0;
  int num_rows = 0;     // padding included
  int num_samples = 0;  // rows that sample, padding included
  int num_copies = 0;   // of state tensors
  bool with_drafts = false;
};

// The arrays of a step that go to the device as they are, one after the other in one block: the host writes them and
// the ops read them at the same offsets. The copies come last, so that the addresses of all others depend on the first
// three sizes alone, as graphs need it.
struct StepArrays {
  std::int64_t* positions = nullptr;          // [num_tokens]
  std::int64_t* slot_mapping = nullptr;       // [num_tokens]
  std::int32_t* query_start_loc = nullptr;    // [num_rows + 1]
  std::int32_t* seq_lens = nullptr;           // [num_rows]
  std::int32_t* state_indices = nullptr;      // [num_rows]
  std::uint8_t* has_initial_state = nullptr;  // [num_rows]
  std::int32_t* logits_indices = nullptr;     // [num_samples]
  std::int32_t* sample_slots = nullptr;       // [num_samples]: of the request
  std::int32_t* output_positions = nullptr;   // [num_samples]

  // With drafts (draft_kernels.h: DraftRows, PlaceTokens, VerifyTokens).
  std::int32_t* row_slots = nullptr;  // [num_rows], as those below
  std::int32_t* num_rejected = nullptr;
  std::int32_t* num_accepted = nullptr;  // of GdnSequences
  std::int32_t* first_samples = nullptr;
  std::int32_t* capacities = nullptr;
  std::int32_t* next_ids = nullptr;
  std::int32_t* snapshot_slots = nullptr;  // of GdnSequences
  std::int32_t* snapshot_offsets = nullptr;
  std::int32_t* num_context = nullptr;  // [num_samples]: of DeviceSampler::Args

  std::int64_t* copy_sources = nullptr;       // [num_copies]: addresses
  std::int64_t* copy_destinations = nullptr;  // [num_copies]
  std::int64_t* copy_sizes = nullptr;         // [num_copies]: bytes
  std::size_t num_bytes = 0;                  // of all, a multiple of 16

  // base: 16-byte aligned; null where only num_bytes is wanted.
  static StepArrays at(std::byte* base, const StepSizes& sizes);
};

}  // namespace deltaic

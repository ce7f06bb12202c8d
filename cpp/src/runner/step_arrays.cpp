#include "cpp/src/runner/step_arrays.h"

#include <initializer_list>

namespace deltaic {

StepArrays StepArrays::at(std::byte* base, const StepSizes& sizes) {
  StepArrays arrays;
  const auto take = [&]<class T>(T*& array, int count) {
    constexpr std::size_t kAlignment = 16;
    if (base != nullptr) array = reinterpret_cast<T*>(base + arrays.num_bytes);
    arrays.num_bytes += (static_cast<std::size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  };
  take(arrays.positions, sizes.num_tokens);
  take(arrays.slot_mapping, sizes.num_tokens);
  take(arrays.query_start_loc, sizes.num_rows + 1);
  take(arrays.seq_lens, sizes.num_rows);
  take(arrays.state_indices, sizes.num_rows);
  take(arrays.has_initial_state, sizes.num_rows);
  take(arrays.logits_indices, sizes.num_samples);
  take(arrays.sample_slots, sizes.num_samples);
  take(arrays.output_positions, sizes.num_samples);
  if (sizes.with_drafts) {
    for (auto* array : {&arrays.row_slots, &arrays.num_rejected, &arrays.num_accepted, &arrays.first_samples,
                        &arrays.capacities, &arrays.next_ids, &arrays.snapshot_slots, &arrays.snapshot_offsets})
      take(*array, sizes.num_rows);
    take(arrays.num_context, sizes.num_samples);
  }
  take(arrays.copy_sources, sizes.num_copies);
  take(arrays.copy_destinations, sizes.num_copies);
  take(arrays.copy_sizes, sizes.num_copies);
  return arrays;
}

}  // namespace deltaic

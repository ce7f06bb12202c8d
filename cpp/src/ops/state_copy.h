#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/ops/context.h"

namespace deltaic {

// A request's recurrent states lie in slots of a pool. Its row of the block table says which: column c holds the state
// after (c + 1) * block_size tokens, the running column the newest one, and the columns after it the states after each
// draft. Slot 0 belongs to nobody: it is never written.

namespace ops {

enum class ConvLayout : std::uint8_t {
  sd,  // [num_slots, conv_width, dim]
  ds   // [num_slots, dim, conv_width]
};

// One state tensor of one layer. Everything is in bytes but conv_width and the counts.
struct StateTensor {
  std::uint64_t base = 0;        // address of slot 0
  std::int64_t slot_stride = 0;  // from one slot to the next; pages may be larger than the state
  std::int64_t num_slots = 0;
  std::int64_t state_bytes = 0;  // of one slot, without gaps
  std::int64_t row_bytes = 0;    // conv: one token (SD) or one channel (DS)
  std::int64_t row_stride = 0;   // conv DS: from one channel to the next
  std::int64_t num_rows = 0;     // conv DS: channels; otherwise 0
  std::int32_t elem_size = 0;    // 1, 2, 4 or 8
  std::int32_t conv_width = 0;   // tokens that a conv state holds; 0: a temporal state
  std::int32_t group = 0;        // which block table
};

// Describe [num_slots, ...] tensors; the first stride is free, the others must be those of a contiguous tensor (DS: the
// stride of a channel may be larger). Throw InvalidArgument otherwise. Of dtype only the size matters.
StateTensor conv_state(const TensorView& state, ConvLayout layout, int group);
StateTensor temporal_state(const TensorView& state, int group);

// i32 [num_rows, num_columns]: the slots of each request. Rows may have any stride; entries below 0 and 0 mean none.
struct BlockTable {
  const std::int32_t* data = nullptr;
  std::int64_t row_stride = 0;  // in elements
  std::int32_t num_rows = 0;
  std::int32_t num_columns = 0;
};

// Bytes of a state that one block of threads copies at a time.
inline constexpr std::int64_t kStateTileBytes = 32768;

// All states of a model and their block tables, ready for copies on one device. Owns its tables of addresses, not the
// states; what it points to must stay where it is.
class StateCopyPlan {
 public:
  // Throws InvalidArgument for no states, a group without a table, block_size < 1, or tensors of several devices.
  StateCopyPlan(std::vector<StateTensor> states, std::span<const TensorView> block_tables, int block_size,
                Device device);

  const std::vector<StateTensor>& states() const { return states_; }
  const std::vector<BlockTable>& block_tables() const { return block_tables_; }
  // Where state s ends in the tiles of one request.
  const std::vector<std::int32_t>& tile_ends() const { return tile_ends_; }
  int block_size() const { return block_size_; }
  int num_rows() const { return num_rows_; }        // of the shortest table
  int num_columns() const { return num_columns_; }  // of the narrowest table
  Device device() const { return device_; }
  const Buffer& device_tables() const { return device_tables_; }

 private:
  std::vector<StateTensor> states_;
  std::vector<BlockTable> block_tables_;
  std::vector<std::int32_t> tile_ends_;
  int block_size_, num_rows_ = 0, num_columns_ = 0;
  Device device_;
  Buffer device_tables_;
};

// Vectors of i32 on the device of the plan. Entry i belongs to row i of the block tables and of the batch; with
// slot_ids, entry slot_ids[i] does, and a negative slot id skips the row. The inputs are a snapshot: no output may be
// one of them.
struct StateCopyInputs {
  TensorView num_accepted_tokens;   // of the last step, with the one that is no draft: 1 ... 1 + drafts
  TensorView state_idx;             // running column; negative: none
  TensorView num_computed_tokens;   // before the step
  TensorView num_scheduled_tokens;  // of the step, with drafts
  std::optional<TensorView> num_draft_tokens = std::nullopt;  // of the step; none: 0
  std::optional<TensorView> slot_ids = std::nullopt;          // [num_reqs]
  std::optional<TensorView> new_computed_tokens =
      std::nullopt;  // postprocess: counts after acceptance, instead of the three above
};

// After sampling. Where an accepted token completed a block, copies the state after exactly that block from the running
// column into the block's own column. num_accepted_out becomes 1 where that is the running column itself, else the
// count.
//   num_accepted_out  i32, as long as num_accepted_tokens; only the entries of the num_reqs rows are written
// Rows whose columns are not in the table (a garbage count, say) are left alone and keep their count; a build with
// debug checks throws InvalidArgument for them on the CPU. One launch, no synchronization; num_reqs may be 0.
void postprocess_states(const Context& ctx, const StateCopyPlan& plan, int num_reqs, const StateCopyInputs& inputs,
                        TensorView num_accepted_out);

// Before the forward. Where the step's last token lies in another column than the running one, copies the running state
// there, and num_accepted_out becomes 1, else the count. state_idx_out: the running column of the step.
// Limits and rows that cannot be copied: as above.
void preprocess_states(const Context& ctx, const StateCopyPlan& plan, int num_reqs, const StateCopyInputs& inputs,
                       TensorView num_accepted_out, TensorView state_idx_out);

// The same arguments as raw pointers, for the backends. Pointers that do not apply are null.
struct StateCopyArgs {
  const std::int32_t* num_accepted = nullptr;
  const std::int32_t* state_idx = nullptr;
  const std::int32_t* num_computed = nullptr;
  const std::int32_t* num_scheduled = nullptr;
  const std::int32_t* num_drafts = nullptr;
  const std::int32_t* slot_ids = nullptr;
  const std::int32_t* new_computed = nullptr;
  std::int32_t* num_accepted_out = nullptr;
  std::int32_t* state_idx_out = nullptr;  // null: postprocess
  std::int32_t num_reqs = 0;
  std::int32_t num_slots = 0;  // entries of the vectors above that are indexed by slot id
  std::int32_t block_size = 0;
  std::int32_t num_columns = 0;
};

}  // namespace ops

namespace cpu {
void copy_states(ThreadPool& threads, const ops::StateCopyPlan& plan, const ops::StateCopyArgs& args);
}
namespace cuda {
// states, block tables and tile ends, one after the other, on the plan's device. Blocks until they are there.
Buffer upload_state_copy_tables(const ops::StateCopyPlan& plan);
void copy_states(ops::Stream stream, const ops::StateCopyPlan& plan, const ops::StateCopyArgs& args);
}  // namespace cuda

}  // namespace deltaic

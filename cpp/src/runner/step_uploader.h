#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/runner/state_copies.h"
#include "cpp/src/runner/step_arrays.h"
#include "cpp/src/runner/step_plan.h"

namespace deltaic {

// Brings planned steps to a CUDA device, into arrays of fixed addresses.
//
// A step is one pinned buffer, which a kernel reads: what the plan has as it is, the tokens that the host knows, and
// the blocks that requests got since they ran last. Tokens that the host does not know come from last_sampled(). The
// device keeps the blocks of a request in a row that is its slot, and the kernel gathers the rows of the batch.
// Buffers take turns, so that the host can write a step while earlier ones wait.
class StepUploader {
 public:
  struct Limits {
    int max_num_reqs = 0;
    int max_num_tokens = 0;
    std::int64_t block_table_row_stride = 0;
    int block_size = 0;
    int num_speculative_tokens = 0;
    bool takes_own_drafts = false;  // a placeholder is the draft that the request's last step made (SchedulerOutput)
  };
  // What a step runs: rows from plan.num_rows to num_rows are padding. With query_len it has that many tokens a row, as
  // its graph has, those that no row has at the end: id 0 at position 0, without a slot.
  struct Frame {
    int num_rows = 0;
    int query_len = 0;
  };
  // `copier` must outlive the uploader.
  StepUploader(const Limits& limits, const StateCopier& copier, Device device);

  // Enqueues the step on the stream. Waits only when all buffers are still to be read. A row of padding has one token,
  // id 0 at position 0, that sees one key, without a slot anywhere.
  //   group  the attention group of the batch
  void upload(const cuda::Stream& stream, const StepPlan& plan, InputBatch& batch, int group, Frame frame);

  // Of the last step, on the device. The shapes say nothing about the content: at a step of num_rows decodes, padding
  // included, the addresses are the same whenever num_rows is.
  ForwardInputs inputs() const;
  TensorView logits_indices() const;    // [num_samples] i32
  TensorView sample_slots() const;      // [num_samples] i32; -1: padding
  TensorView output_positions() const;  // [num_samples] i32
  TensorView num_context() const;       // [num_samples] i32, with drafts
  // With drafts: the arrays of the step, and its tokens with -1 for a draft that is not there.
  const StepArrays& arrays() const { return device_arrays_; }
  TensorView token_ids() const { return token_ids_.view().slice(0, sizes_.num_tokens); }
  const StepSizes& sizes() const { return sizes_; }
  // Sources, destinations and sizes of the state copies: before the forward, and after it.
  std::array<TensorView, 3> copies_before() const { return copies(0, num_copies_before_); }
  std::array<TensorView, 3> copies_after() const { return copies(num_copies_before_, sizes_.num_copies); }
  // Rows of the batch that sample, without padding.
  const std::vector<int>& sampled_rows() const { return sampled_rows_; }
  int num_samples() const { return sizes_.num_samples; }

  // [1 + num_speculative_tokens, max_num_reqs] i32, by slot: the token that each request sampled last, and its drafts.
  TensorView kept_tokens() const { return kept_tokens_.view(); }

 private:
  // What goes to the device, in pinned memory, and when it was read.
  struct Staging {
    cuda::PinnedBuffer memory;
    cuda::Event was_read;
  };
  void count(const StepPlan& plan, const InputBatch& batch, int group, Frame frame);
  void fill(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch) const;
  void fill_samples(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch) const;
  void fill_draft_rows(const StepArrays& arrays, const StepPlan& plan, const InputBatch& batch, int group) const;
  void refer_to_kept_tokens(const StepPlan& plan, const BatchRow& row, int index, std::int32_t* ids) const;
  std::array<TensorView, 3> copies(int begin, int end) const;
  TensorView view(void* data, DType dtype, std::initializer_list<std::int64_t> shape) const {
    return make_view(data, dtype, shape, device_);
  }

  Limits limits_;
  const StateCopier& copier_;
  Device device_;
  Buffer arrays_memory_;  // of the StepArrays
  Tensor input_ids_;      // [max_num_tokens] i32
  Tensor token_ids_;      // [max_num_tokens] i32, with drafts
  Tensor block_table_;    // [max_num_reqs, row_stride] i32, by row
  Tensor slot_tables_;    // [max_num_reqs, row_stride] i32, by slot
  Tensor kept_tokens_;    // [1 + num_speculative_tokens, max_num_reqs] i32, by slot
  std::array<Staging, 3> stagings_;
  std::size_t turn_ = 0;

  StepSizes sizes_;  // of the last step, with what else is known of it
  int num_copies_before_ = 0, num_new_blocks_ = 0;
  int num_decodes_ = 0, decode_query_len_ = 1, max_query_len_ = 0, max_seq_len_ = 0;
  std::vector<int> sampled_rows_;
  StepArrays device_arrays_;
};

}  // namespace deltaic

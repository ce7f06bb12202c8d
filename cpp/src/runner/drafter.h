#pragma once

#include <memory>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/models/mtp_module.h"
#include "cpp/src/runner/step_plan.h"

namespace deltaic {

// Runs the draft module behind a step on the CPU: over the tokens that the step computed and that stand, so that the
// module's cache holds what the model's holds, and then token by token along a chain of drafts.
//
// A step that makes no drafts runs nothing. It keeps its hidden states for the next one that does, up to kMaxPending a
// request; a request that has more is not drafted for in this life, like one whose prefix hit covers such a stretch.
class Drafter {
 public:
  static constexpr int kMaxPending = 64;

  //   block_size  of the target's blocks, whose ids the module's cache uses
  Drafter(const ModelConfig& model, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
          const RunnerOptions& options, const AttentionCacheViews& cache, int block_size);

  // After the step was sampled. Each row that sampled gets up to plan.num_drafts drafts (BatchRow::draft_token_ids, and
  // output.draft_token_ids in row order): as many as its blocks hold and max_model_len allows. They are chosen with the
  // request's own parameters and noise, so that they are what the model would choose if it gave the same logits.
  //   hidden_states  of the step's forward, all its tokens
  //   block_table    of the target's attention group
  void run(const StepPlan& plan, const TensorView& hidden_states, const BlockTable& block_table, InputBatch& batch,
           ModelRunnerOutput& output);

 private:
  // One pass of the module: per row of the batch some tokens, often none.
  struct Pass {
    std::vector<std::int32_t> input_ids, hidden_rows, query_start_loc, seq_lens;
    std::vector<std::int64_t> positions, slot_mapping;
    void clear();
    void begin_rows() { query_start_loc.push_back(0); }
    void end_row(int seq_len);
  };
  void add_token(std::int32_t token_id, int position, int hidden_row, std::span<const std::int32_t> blocks);
  // Finds out what the module's cache has of a row's tokens in front of the step.
  void look_up(BatchRow& row, std::span<const std::int32_t> blocks) const;
  // Notes that the module has not read the row's positions [row.num_computed_tokens, end).
  void skip(BatchRow& row, int end, const float* hidden, std::span<const std::int32_t> blocks);
  TensorView forward(const TensorView& hidden_states, const TensorView& block_table);
  // Chooses the next draft of the rows in drafting_, whose last hidden states are in the rows last_rows_; rows without
  // one leave drafting_.
  void choose(const TensorView& hidden, InputBatch& batch);

  ops::Context ctx_;
  int vocab_size_, block_size_, max_model_len_;
  AttentionCacheViews cache_;
  MtpModule module_;
  std::int64_t hidden_size_;
  Tensor logits_;                     // [max_num_reqs, vocab_size]
  std::vector<int> num_filled_;       // of each block, the leading slots that the module has written
  std::vector<float> joined_hidden_;  // pending rows, then those of the step
  Pass pass_;
  std::vector<int> drafting_;            // rows of the batch that get a further draft
  std::vector<std::int32_t> last_rows_;  // of each, its last row of the pass
};

}  // namespace deltaic

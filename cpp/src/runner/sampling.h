#pragma once

#include <span>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/ops/sampler.h"
#include "cpp/src/ops/verify_drafts.h"
#include "cpp/src/runner/input_batch.h"

namespace deltaic {

// Turns the hidden states of a forward into sampled tokens and writes them back into the batch.
class StepSampler {
 public:
  // Holds logits of max_num_rows rows: a request's newest token and its drafts each need one.
  StepSampler(int vocab_size, int max_num_rows, const ops::Context& ctx);

  // Of the first num_rows rows, in row order.
  //   hidden_states  what the forward of this step returned
  //   inputs         of this step
  // A row that does not reach its newest known token gives an empty list and stays as it is. A row whose logits are not
  // finite gives an empty list and is reported as failed. Every other row grows by its token, and by the drafts before
  // it that were accepted.
  ModelRunnerOutput sample(HybridDecoder& decoder, const TensorView& hidden_states, const StepInputs& inputs,
                           int num_rows, InputBatch& batch);

 private:
  // False where the logits of a prompt position are not finite.
  bool add_prompt_logprobs(HybridDecoder& decoder, const TensorView& hidden_states, int first_hidden_row,
                           const BatchRow& row, ModelRunnerOutput& output);
  TensorView logits(std::int64_t num_rows) const { return logits_.view().slice(0, num_rows); }

  ops::Context ctx_;
  int vocab_size_;
  int max_num_rows_;
  Tensor logits_;                          // [max_num_rows, vocab_size] f32
  std::vector<std::int32_t> hidden_rows_;  // of the rows that logits are computed for
  std::vector<int> sampled_rows_;          // rows of the batch that sample
  std::vector<ops::DraftRow> draft_rows_;
};

}  // namespace deltaic

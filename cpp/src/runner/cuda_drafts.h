#pragma once

#include <optional>

#include "cpp/src/models/mtp_module.h"
#include "cpp/src/ops/device_sampler.h"
#include "cpp/src/runner/draft_kernels.h"
#include "cpp/src/runner/step_executor.h"
#include "cpp/src/runner/step_results.h"
#include "cpp/src/runner/step_uploader.h"

namespace deltaic {

// What steps with drafts do on CUDA beside the forward: they verify the drafts, and make the next ones. How many were
// accepted stays on the device, where the next step begins behind them (draft_kernels.h). Everything is enqueued, and
// has fixed addresses for a number of rows and tokens.
//
// The draft module runs behind every step, also behind one that makes no drafts, so that its cache has all that the
// model's has: it is one layer.
class CudaDrafts {
 public:
  // `uploader` must outlive this.
  CudaDrafts(const ExecutorParts& parts, const StepUploader& uploader);

  // Once the step was uploaded: puts its rows where they begin.
  void place();
  // What the sampler is to see in front of each row of logits.
  TensorView context_ids() const { return context_ids_.view().slice(0, uploader_.num_samples()); }

  // What was sampled at each position of the step.
  struct Sampled {
    TensorView hidden_states;         // of the forward
    ForwardInputs inputs;             // likewise
    TensorView logits;                // [>= num_rows, vocab_size] f32: free now
    TensorView token_ids, is_finite;  // [>= num_samples]: likewise, once verified
    bool all_greedy = false;
  };
  // Verifies the drafts, tells the sampler which tokens stand, and makes the next drafts.
  void verify_and_draft(const Sampled& sampled, int num_drafts, ops::DeviceSampler& sampler);
  // What became of the step, to the host.
  void fetch(StepResult& result) const;

 private:
  cuda::DraftSlots kept() const;
  cuda::DraftRows rows() const;
  cuda::VerifiedRows result() const;
  cuda::DraftPass pass() const;
  void make_drafts(const Sampled& sampled, int num_drafts, ops::DeviceSampler& sampler);

  ExecutorParts parts_;
  const StepUploader& uploader_;
  int max_drafts_, max_num_reqs_;
  std::optional<MtpModule> module_;  // with a draft group

  Tensor num_accepted_, num_rejected_;  // [max_num_reqs] i32, by slot: of DraftSlots
  Tensor context_ids_;                  // [max_num_reqs * (1 + max_drafts), max_drafts] i32
  Tensor result_;                       // words of VerifiedRows
  Tensor shifted_ids_;                  // [max_num_tokens] i32
  Tensor counted_;                      // [max_num_tokens + 1] i32: 0, 1, 2, ...
  Tensor pass_ints_, pass_longs_;       // [6 + max_drafts, max_num_reqs] i32, [3, max_num_reqs] i64: of DraftPass
};

}  // namespace deltaic

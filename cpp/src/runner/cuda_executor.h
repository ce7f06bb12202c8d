#pragma once

#include <array>
#include <map>
#include <memory>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/ops/device_sampler.h"
#include "cpp/src/runner/state_copies.h"
#include "cpp/src/runner/step_executor.h"
#include "cpp/src/runner/step_graphs.h"
#include "cpp/src/runner/step_results.h"
#include "cpp/src/runner/step_uploader.h"

namespace deltaic {

// Enqueues steps on one stream, in order, and waits for none: input ids of a decode come from the tokens that the step
// before left on the device. Steps of decodes alone run as graphs, with their rows padded; others launch kernel by
// kernel. The device must be current (cuda::CurrentDevice) in every call.
//
// Only prompt_logprobs wait, as their logits of a whole prompt would not fit anywhere.
class CudaExecutor : public StepExecutor {
 public:
  explicit CudaExecutor(const ExecutorParts& parts);
  ~CudaExecutor() override;

  void forward(const StepPlan& plan) override;
  AsyncModelRunnerOutput sample(const StepPlan& plan) override;
  void settle(StepPlan& plan) override;

 private:
  // Steps without a request, so that the first that has one finds libraries and kernels loaded and its graph recorded.
  void warm_up();
  void run_forward(const StepPlan& plan, int num_rows);
  void copy_states(const std::array<TensorView, 3>& copies);
  // How the rows of a step are sampled.
  struct Wishes {
    bool all_greedy = true;
    int num_logprobs = -1;
  };
  Wishes add_samples(StepResult& result);
  void register_request(BatchRow& row);
  // False where the logits of a prompt position are not finite.
  bool add_prompt_logprobs(int first_hidden_row, const BatchRow& row, ModelRunnerOutput& output);
  void enqueue_samples(const Wishes& wishes, StepResult& result);
  void fetch_logits(StepResult& result);
  void fetch_tokens(const ops::DeviceSampler::Args& args, StepResult& result);

  ExecutorParts parts_;
  HybridDecoder decoder_;
  StateCopier copier_;
  StepUploader uploader_;
  StepGraphs graphs_;
  ops::DeviceSampler sampler_;
  std::shared_ptr<StepResults> results_;

  Tensor logits_;                      // [max_num_reqs, vocab_size] f32
  Tensor token_ids_;                   // [max_num_reqs] i32, of the step
  Tensor is_finite_;                   // [max_num_reqs] u8
  Tensor ranks_;                       // [max_num_reqs] i32
  Tensor logprob_token_ids_;           // [max_num_reqs * (1 + kMaxLogprobs)] i32
  Tensor logprobs_;                    // likewise, f32
  Tensor prompt_rows_;                 // [max_num_reqs] i32: hidden rows that prompt logprobs are computed for
  cuda::PinnedBuffer prompt_staging_;  // the same on the host, then their logits

  // Of the last forward.
  bool is_graph_step_ = false;
  TensorView hidden_states_;
  std::map<int, TensorView> graph_hidden_states_;  // by the rows of the graph
};

}  // namespace deltaic

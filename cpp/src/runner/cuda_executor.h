#pragma once

#include <array>
#include <map>
#include <memory>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/ops/device_sampler.h"
#include "cpp/src/runner/cuda_drafts.h"
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
  // Of the graph that a step runs as; without a query_len it launches kernel by kernel.
  StepUploader::Frame frame_of(const StepPlan& plan) const;
  void run_forward(const StepPlan& plan, StepUploader::Frame frame);
  // Records the graph while warming up, then launches it where there is one.
  void run_graph(StepGraphs::Part part, int num_drafts, const std::function<void()>& enqueue);
  void copy_states(const std::array<TensorView, 3>& copies);
  // How the rows of a step are sampled.
  struct Wishes {
    bool all_greedy = true;
    int num_logprobs = -1;
    int num_drafts = 0;  // that are made
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
  std::vector<int> graph_query_lens_;  // ascending; none without graphs
  bool is_warming_up_ = false;
  ops::DeviceSampler sampler_;
  std::optional<CudaDrafts> drafts_;  // with num_speculative_tokens
  std::shared_ptr<StepResults> results_;

  int max_num_samples_;                // of a step: max_num_reqs, with drafts 1 + num_speculative_tokens times as many
  Tensor logits_;                      // [max_num_samples, vocab_size] f32
  Tensor token_ids_;                   // [max_num_samples] i32, of the step
  Tensor is_finite_;                   // [max_num_samples] u8
  Tensor ranks_;                       // [max_num_samples] i32
  Tensor logprob_token_ids_;           // [max_num_samples * (1 + kMaxLogprobs)] i32
  Tensor logprobs_;                    // likewise, f32
  Tensor prompt_rows_;                 // [max_num_reqs] i32: hidden rows that prompt logprobs are computed for
  cuda::PinnedBuffer prompt_staging_;  // the same on the host, then their logits

  // Of the last forward.
  StepUploader::Frame frame_;
  ForwardInputs inputs_;
  TensorView hidden_states_;
  std::map<std::pair<int, int>, TensorView> graph_hidden_states_;  // by rows and tokens of a row
};

}  // namespace deltaic

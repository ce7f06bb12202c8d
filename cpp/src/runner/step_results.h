#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/runner/step_plan.h"

namespace deltaic {

// What a step sampled, on its way to the host. The device writes the pinned arrays.
struct StepResult {
  // One row that samples.
  struct Sample {
    int row = 0;                // of the output
    int position = 0;           // of its token in BatchRow::token_ids
    int num_logprobs = -1;      // wanted from the arrays below; -1: none
    int num_host_logprobs = 0;  // wanted from the logits below, if they have the row; -1: all
    bool is_wanted = true;      // false: the request failed already
  };
  std::int32_t placeholder = -1;  // stands for its tokens in the batch; of no other step in flight
  ModelRunnerOutput output;       // complete but for the samples
  std::vector<Sample> samples;

  // [num_samples] each, and [num_samples, 1 + columns].
  std::int32_t* token_ids = nullptr;
  std::uint8_t* is_finite = nullptr;
  std::int32_t* ranks = nullptr;
  std::int32_t* logprob_token_ids = nullptr;
  float* logprobs = nullptr;
  int columns = 0;

  // Raw logits of the rows that want more logprobs than the device gives: [logits_samples.size(), vocab_size] f32.
  std::vector<int> logits_samples;
  cuda::PinnedBuffer logits;

  cuda::Event is_done;
  bool was_read = false;

 private:
  friend class StepResults;
  cuda::PinnedBuffer memory;
};

// The results of the steps in flight. Those who wait for one share the ownership, as they may outlive the runner.
class StepResults {
 public:
  // max_columns: the most logprobs a row that the device gives. The planner's batch gets the tokens as they are read.
  StepResults(StepPlanner& planner, int vocab_size, int max_num_samples, int max_columns);

  // An empty result for the next step: its arrays are no longer in use.
  std::shared_ptr<StepResult> open();
  // Waits for the result, completes its output and puts its tokens into the batch in the place of the placeholders
  // that are still there; once, further calls do nothing. Throws DeviceError.
  void read(StepResult& result);
  void read_all();
  // The runner goes: nothing is written into its batch any more.
  void detach() { planner_ = nullptr; }

 private:
  void take_token(StepResult& result, std::size_t index);
  // No token: the row failed.
  void replace_placeholder(const StepResult& result, const StepResult::Sample& sample,
                           std::optional<std::int32_t> token);

  StepPlanner* planner_;
  std::int64_t vocab_size_;
  int max_num_samples_, max_columns_;
  std::int32_t last_placeholder_ = 0;
  std::vector<std::shared_ptr<StepResult>> pool_;
};

}  // namespace deltaic

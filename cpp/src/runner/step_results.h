#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/runner/step_plan.h"

namespace deltaic {

// What a step with drafts gives, by row of the step and in words: cuda::VerifiedRows, in one piece.
struct VerifiedWords {
  VerifiedWords(std::int32_t* words, int num_rows, int max_drafts)
      : token_ids(words),
        counts(token_ids + std::int64_t{num_rows} * (1 + max_drafts)),
        is_finite(counts + num_rows),
        drafts(is_finite + num_rows) {}
  static std::int64_t count(int num_rows, int max_drafts) { return std::int64_t{num_rows} * (3 + 2 * max_drafts); }

  std::int32_t* token_ids;  // [num_rows, 1 + max_drafts]
  std::int32_t* counts;     // [num_rows], as is_finite
  std::int32_t* is_finite;
  std::int32_t* drafts;  // [num_rows, max_drafts]
};

// What a step sampled, on its way to the host. The device writes the pinned arrays.
struct StepResult {
  // One row that samples.
  struct Sample {
    int row = 0;                // of the output
    int first = 0;              // of its rows of logits, one a token
    int num_drafts = 0;         // that were verified
    int num_logprobs = -1;      // wanted from the arrays below; -1: none
    int num_host_logprobs = 0;  // wanted from the logits below, if they have the row; -1: all
    bool is_wanted = true;      // false: the request failed already
  };
  std::int32_t placeholder =
      -1;                    // stands for its tokens in the batch, 1 + num_drafts a row; of no other step in flight
  ModelRunnerOutput output;  // complete but for the samples
  std::vector<Sample> samples;

  // [num_samples] each, by row of logits, and [num_samples, 1 + columns]. With drafts the first two are not used:
  std::int32_t* token_ids = nullptr;
  std::uint8_t* is_finite = nullptr;
  std::int32_t* verified = nullptr;  // VerifiedWords of num_rows, padding included
  int num_rows = 0;
  bool makes_drafts = false;
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
  StepResults(StepPlanner& planner, int vocab_size, int max_num_rows, int max_drafts, int max_columns);

  // An empty result for the next step: its arrays are no longer in use.
  std::shared_ptr<StepResult> open();
  // Waits for the result, completes its output and puts its tokens into the batch in the place of the placeholders
  // that are still there; once, further calls do nothing. Throws DeviceError.
  void read(StepResult& result);
  void read_all();
  // The runner goes: nothing is written into its batch any more.
  void detach() { planner_ = nullptr; }

 private:
  void take_tokens(StepResult& result, const StepResult::Sample& sample);
  void take_logprobs(StepResult& result, const StepResult::Sample& sample, int index, std::int32_t token) const;
  // No tokens: the row failed.
  void replace_placeholders(const StepResult& result, const StepResult::Sample& sample,
                            std::span<const std::int32_t> tokens);

  StepPlanner* planner_;
  std::int64_t vocab_size_;
  int max_num_rows_, max_drafts_, max_columns_;
  std::int32_t last_placeholder_ = 0;
  std::vector<std::shared_ptr<StepResult>> pool_;
};

}  // namespace deltaic

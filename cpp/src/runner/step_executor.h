#pragma once

#include <algorithm>
#include <memory>

#include <deltaic/error.h>
#include <deltaic/runner.h>
#include <deltaic/step_hook.h>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/runner/cache_groups.h"
#include "cpp/src/runner/kv_caches.h"
#include "cpp/src/runner/step_plan.h"

namespace deltaic {

struct MtpWeights;  // models/decoder_weights.h

// How planned steps are run on a device. The CPU runs them at once (cpu_executor.h), CUDA on a
// stream (cuda_executor.h).
class StepExecutor {
 public:
  virtual ~StepExecutor() = default;

  // The state copies before it, the forward, the copies after it.
  virtual void forward(const StepPlan& plan) = 0;
  // Samples from the forward of this plan, once, and writes the tokens into the batch: those that are still in flight
  // as a negative number until the output is read.
  virtual AsyncModelRunnerOutput sample(const StepPlan& plan) = 0;
  // For tests and debugging: waits for everything, and fills in what the host did not know, in the plan and in the
  // batch.
  virtual void settle(StepPlan& plan) = 0;
  // ModelRunner::set_step_hook.
  virtual void set_hook(std::shared_ptr<StepHook>) { throw Unsupported("step hooks are for the CPU"); }
};

// What an executor works on. All of it outlives the executor.
struct ExecutorParts {
  const ModelConfig& model;
  const RunnerOptions& options;
  const CacheGroups& groups;
  const ops::Context& ctx;
  const cuda::Stream* stream;  // of ctx; null on the CPU
  std::shared_ptr<const DecoderWeights> weights;
  std::shared_ptr<const MtpWeights> mtp_weights;  // null without a draft group
  const KvCaches& caches;
  StepPlanner& planner;
};

// Of a step with these options.
inline DecoderLimits decoder_limits(const RunnerOptions& options) {
  return {.max_num_tokens = options.max_num_batched_tokens,
          .max_num_seqs = options.max_num_reqs,
          .max_model_len = options.max_model_len,
          .max_num_decodes = options.max_num_reqs,
          .max_decode_query_len = 1 + options.num_speculative_tokens};
}

// The same on CUDA, where steps of decodes are padded.
inline DecoderLimits padded_decoder_limits(const RunnerOptions& options) {
  DecoderLimits limits = decoder_limits(options);
  limits.max_num_tokens = std::max(limits.max_num_tokens, limits.max_num_decodes * limits.max_decode_query_len);
  return limits;
}

}  // namespace deltaic

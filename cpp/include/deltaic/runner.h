#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <deltaic/cache.h>
#include <deltaic/config.h>
#include <deltaic/scheduler_output.h>
#include <deltaic/tensor.h>

namespace deltaic {

// Checkpoint name -> tensor in memory. The memory must outlive the runner.
using TensorMap = std::map<std::string, TensorView>;

struct RunnerOptions {
  Device device;
  DType dtype = DType::f32;           // CUDA: of weights and activations, f32 | bf16 | f16. The CPU computes in f32
  int max_num_reqs = 32;              // live at once; on CUDA at most 1024
  int max_model_len = 4096;           // tokens of one request, prompt and output
  int max_num_batched_tokens = 2048;  // of one step
  int num_speculative_tokens = 0;     // the most drafts of a request in a step; with a draft group, also made
  int num_threads = 0;                // CPU; 0: all that this process may use
  // The last input id of a decode is what the step before sampled, whatever the SchedulerOutput says or does not know
  // yet: a step can be enqueued before the output of the last one is read.
  bool async_input_combine = false;
  // Fills KV and state caches with NaN at start-up: results must not change. For tests.
  bool poison_caches = false;
  bool enforce_eager = false;  // CUDA: no graphs
  bool dummy_weights = false;  // random weights instead of the checkpoint's tensors, of which only config.json is read
  // For benches, CUDA: each draft is accepted with this probability by a script, whatever it is. < 0: as it must be.
  float scripted_draft_acceptance = -1.0F;
  ParallelConfig parallel{};  // size 1 is what this version runs
};

// The tokens of a step that may still run. get_output() may be called once, from the thread that drives the runner; it
// waits for the step. Throws InvalidArgument for a second call.
class AsyncModelRunnerOutput {
 public:
  explicit AsyncModelRunnerOutput(ModelRunnerOutput output);
  // wait: blocks until the output is there, and returns it.
  explicit AsyncModelRunnerOutput(std::function<ModelRunnerOutput()> wait) : wait_(std::move(wait)) {}
  ModelRunnerOutput get_output();

 private:
  std::function<ModelRunnerOutput()> wait_;  // none once it was called
};

// What the last step ran on, for tests and debugging.
struct StepInputs {
  std::vector<std::int32_t> input_token_ids;  // [num_tokens]
  std::vector<std::int64_t> positions;        // [num_tokens]
  std::vector<std::int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<std::int32_t> logits_indices;   // [num_reqs]: the row of each request's last token
};
struct AttentionMetadataView {
  std::vector<std::int32_t> seq_lens;     // [num_reqs]
  std::vector<std::int32_t> block_table;  // [num_reqs, row_stride]
  std::int64_t block_table_row_stride = 0;
  std::vector<std::int64_t> slot_mapping;  // [num_tokens]
};
struct GdnMetadataView {
  int num_decodes = 0;       // without drafts
  int num_spec_decodes = 0;  // with some; they lie among the decodes
  int num_prefills = 0;
  int num_decode_tokens = 0;
  int num_spec_decode_tokens = 0;
  int num_prefill_tokens = 0;
  std::vector<std::int32_t> state_indices;  // decodes, then prefills
  std::vector<std::int32_t> prefill_state_indices;
  std::vector<bool> has_initial_state;                // every row
  std::vector<std::int32_t> num_accepted_tokens;      // every row, with num_speculative_tokens; 0: a prefill
  std::vector<std::int32_t> prefill_query_start_loc;  // rebased to the first prefill token
};

// Throws InvalidArgument naming the row for a duplicate live index, an index >= num_slots, a negative other than -1
// (an inert padding row), or fewer than `required` entries.
void validate_gdn_state_indices(std::span<const std::int32_t> indices, int required, int num_slots);

// Logits of every position of one sequence, computed on its own with private caches: the reference for tests.
struct DenseForwardOutput {
  std::vector<float> logits;  // [num_tokens, vocab_size]
  // [num_layers + 2, num_tokens, hidden_size] when asked for: the embedding output, the residual stream after each
  // layer, the output of the final norm.
  std::vector<float> hidden;
};

// Drafts of the draft module behind one sequence, computed like DenseForwardOutput.
struct DenseDraftOutput {
  std::vector<float> logits;            // [num_drafts, vocab_size]
  std::vector<std::int32_t> token_ids;  // [num_drafts], the likeliest each
  std::vector<float> hidden;            // [num_tokens, hidden_size]: what the module gives for the sequence
};

class InputBatch;
class StepHook;  // deltaic/step_hook.h

// Runs one model: a SchedulerOutput in, sampled tokens out. Not thread-safe. Views and references that it returns are
// valid as long as it is, those of a step until the next one.
class ModelRunner {
 public:
  // Reads a checkpoint folder. Throws InvalidArgument for options, groups, a config or tensors that do not fit,
  // Unsupported for what this version or build does not have, OutOfMemory, DeviceError.
  ModelRunner(const std::filesystem::path& checkpoint, const KVCacheConfig& kv_cache, const RunnerOptions& options);
  // Takes the weights from memory, under the names of a checkpoint. Throws likewise.
  ModelRunner(const ModelConfig& model, const TensorMap& tensors, const KVCacheConfig& kv_cache,
              const RunnerOptions& options);
  ~ModelRunner();
  ModelRunner(ModelRunner&&) noexcept;
  ModelRunner& operator=(ModelRunner&&) noexcept;

  // Applies the step to the batch and runs its forward; on CUDA it enqueues alone. Returns nothing when there was a
  // forward; an output without tokens when nothing was scheduled. Throws InvalidArgument for a step that contradicts
  // itself, the batch or the options: nothing has changed then.
  std::optional<ModelRunnerOutput> execute_model(const SchedulerOutput& input);
  // Calls `hook` around each forward from now on; null: none. Throws InvalidArgument for a hidden_layer() that the
  // model does not have, Unsupported on CUDA and with num_speculative_tokens.
  void set_step_hook(std::shared_ptr<StepHook> hook);
  // Samples from the last forward, and waits. Throws InvalidArgument where no forward waits for it.
  ModelRunnerOutput sample_tokens();
  // The same without waiting; the CPU has done its work when this returns. The next step may be enqueued before
  // get_output() is called.
  AsyncModelRunnerOutput sample_tokens_async();

  const ModelConfig& model_config() const;
  const KVCacheConfig& kv_cache_config() const;
  const RunnerOptions& options() const;

  int full_attn_group_id() const;
  int gdn_group_id() const;  // -1 without one
  std::int64_t num_blocks() const;
  std::int64_t fa_page_size_bytes() const;  // of the attention group's spec
  int num_state_slots() const;              // running and snapshot slots
  std::int64_t weight_bytes() const;        // the draft module's included
  std::int64_t cache_bytes() const;
  static bool supports_async() { return true; }

  // In memory of the device, of the dtype of the spec.
  struct LayerKvCache {
    TensorView k, v;  // [num_blocks, block_size, num_kv_heads, head_dim]; the block stride honours padding
    int layer = 0;    // of the model
  };
  struct LayerStateCache {
    TensorView conv;      // [num_slots, conv_dim, K - 1 + num_speculative_tokens]
    TensorView temporal;  // [num_slots, num_value_heads, value_head_dim, key_head_dim]
    int layer = 0;
  };
  const std::vector<LayerKvCache>& attn_kv() const;
  const std::vector<LayerStateCache>& gdn_state() const;
  // req_id -> its running slot.
  std::map<std::string, int> gdn_state_slots() const;

  // On CUDA these wait for all steps in flight.
  const InputBatch& input_batch() const;
  const StepInputs& last_step() const;
  const AttentionMetadataView& last_attn_meta() const;
  const GdnMetadataView& last_gdn_meta() const;

  // Blocks; steps in flight and their caches are left alone.
  //   positions  [num_streams, num_tokens] with 1 or 3 streams, row after row; empty: 0, 1, 2, ...
  // Throws InvalidArgument for no tokens, an id outside the vocabulary, or positions that do not fit.
  DenseForwardOutput dense_forward(std::span<const std::int32_t> token_ids, bool with_hidden = false,
                                   std::span<const std::int64_t> positions = {});
  // A chain of num_drafts greedy drafts behind token_ids and next_token, which the model chose. Throws InvalidArgument
  // likewise, and without a draft group or for num_drafts < 1.
  DenseDraftOutput dense_draft(std::span<const std::int32_t> token_ids, std::int32_t next_token, int num_drafts);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

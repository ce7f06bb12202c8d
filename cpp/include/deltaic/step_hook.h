#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <deltaic/tensor.h>

namespace deltaic {

// One request of a step. Who owns which rows of the token axis is data, never inferred from shapes.
struct StepRow {
  std::string req_id;
  int first_token = 0;  // on the step's flat token axis
  int num_tokens = 0;   // that it runs in this step
  int num_prompt_tokens = 0;
  int num_computed_tokens = 0;  // before this step

  // The phase rule: a part of the prompt is prefill, however short; a span of several tokens behind it is not.
  bool is_prefill() const { return num_computed_tokens < num_prompt_tokens; }
  int seq_len() const { return num_computed_tokens + num_tokens; }
};

// What a hook is shown of a step. Views are valid during the call alone.
struct StepView {
  std::span<const StepRow> rows;  // in batch order
  TensorView input_ids;           // [num_tokens] i32
  TensorView positions;           // [num_tokens] i64
  TensorView inputs_embeds;       // [num_tokens, hidden_size] f32; without memory unless the hook fills it
  TensorView hidden;              // [num_tokens, hidden_size] f32: output of the final norm; after the forward
  TensorView layer_hidden;        // likewise, of StepHook::hidden_layer(); without memory unless it was asked for
};

// Is called around each forward of a ModelRunner, on the thread that drives it. What it throws fails the step.
class StepHook {
 public:
  virtual ~StepHook() = default;

  // Whether before_forward fills inputs_embeds; else the model embeds the input ids.
  virtual bool fills_embeddings() const { return false; }
  // A further hidden state to see: 0 is the embedding output, i + 1 the residual stream after layer i, num_layers + 1
  // the output of the final norm; -1 is none.
  virtual int hidden_layer() const { return -1; }

  virtual void before_forward(const StepView&) {}
  virtual void after_forward(const StepView&) {}
  // token_ids: one a row, -1 where nothing was sampled. The views are those of the forward.
  virtual void after_sample(const StepView&, std::span<const std::int32_t> /*token_ids*/) {}
};

// Neighbouring rows that one call of a preprocessing hook takes.
struct RowRun {
  int first_row = 0;
  int num_rows = 0;
  bool is_batched = false;  // goes to the batched decode hook; else one row for the scalar hook
};

// What a step does with its rows, decided before anything runs.
struct RowPlan {
  std::vector<RowRun> runs;         // cover the rows in their order; only adjacent batched rows share a run
  std::vector<int> predictor_rows;  // rows that the code predictor runs for, ascending
};

struct RowPlanOptions {
  bool has_batched_hook = false;
  bool has_predictor = false;
};

// A row is eligible for the batched hook and for the predictor when its span is one token and it is not prefill. Throws
// Error unless the rows' tokens follow each other without a gap and lie within num_step_tokens.
RowPlan plan_rows(std::span<const StepRow> rows, int num_step_tokens, const RowPlanOptions& options);

}  // namespace deltaic

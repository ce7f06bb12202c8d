#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <deltaic/step_hook.h>

#include "cpp/src/core/buffer.h"

namespace deltaic {

// Runs the hooks of one stage over the rows of a step: plan, validate, commit. As the hook of the stage's ModelRunner
// it fills the step's embeddings.
//
// The hooks write into staging memory. The ids and embeddings of the step are written, and commit() is called, once all
// hooks have run and what they returned has been checked, so a step that throws has changed nothing. A hook that
// refuses a row fails that row's request alone: its embeddings are zeros, take_failures() names it, and the caller ends
// it.
class StageRunner : public StepHook {
 public:
  // Throws InvalidArgument for sizes below 1.
  StageRunner(int hidden_size, int max_num_tokens);

  bool fills_embeddings() const override { return true; }
  void before_forward(const StepView& step) override;

  // Fills ids() and embeds() up to ids.shape[0], rows behind stay as they are. Throws Error for rows that overlap or
  // leave gaps, before any hook runs, InvalidArgument for more tokens than the buffers hold, and what the hooks throw.
  RowPlan prepare(std::span<const StepRow> rows, TensorView ids);

  TensorView ids() const { return ids_.view(); }        // [max_num_tokens] i32
  TensorView embeds() const { return embeds_.view(); }  // [max_num_tokens, hidden_size] f32
  // Requests that failed since the last call, and why.
  std::map<std::string, std::string> take_failures();

  // ---- what a stage implements ----

  virtual bool has_batched_hook() const { return false; }
  // Of a predictor that runs before the forward, for the decode rows of the step.
  virtual bool has_predictor() const { return false; }
  // Stages the inputs of `rows`: neighbours for the batched decode hook, else one row. `ids` [n] has the scheduled ids
  // and may be rewritten, `embeds` [n, hidden_size] is filled. Returns why the rows are refused, if they are.
  virtual std::optional<std::string> preprocess(std::span<const StepRow> rows, bool is_batched, TensorView ids,
                                                TensorView embeds) = 0;
  // Runs the predictor once for decode rows that were staged: their next embeddings, [rows, hidden_size].
  virtual void predict(std::span<const StepRow> /*rows*/, TensorView /*embeds*/) {}
  // Applies what was staged for rows that did not fail.
  virtual void commit(std::span<const StepRow> /*rows*/) {}
  // Learns which request each row belongs to, in batch order, before the forward. The step's embeddings are filled.
  virtual void begin_step(const StepView& /*step*/) {}

 protected:
  void fail(const std::string& req_id, std::string why) { failures_.insert_or_assign(req_id, std::move(why)); }
  bool has_failed(const std::string& req_id) const { return failures_.contains(req_id); }

 private:
  void run_hooks(std::span<const StepRow> rows, bool is_batched);

  Tensor ids_, embeds_;                // persistent: what a graph would read
  Tensor staged_ids_, staged_embeds_;  // of the step that is being prepared
  Tensor predicted_;
  std::map<std::string, std::string> refused_;  // of the step that is being prepared
  std::map<std::string, std::string> failures_;
};

}  // namespace deltaic

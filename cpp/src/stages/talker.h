#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <deltaic/step_hook.h>

#include "cpp/src/stages/code_predictor.h"

namespace deltaic {

struct TalkerConfig {
  int hidden_size = 0;
  int vocab_size = 0;        // codes and control tokens
  int text_vocab_size = 0;   // 0: the checkpoint has no text embedding
  int text_hidden_size = 0;  // width of what text_projection takes
  int projection_size = 0;   // inner width of the projections
  CodePredictorConfig predictor;
};

// What a request brings to the talker. All rows are [n, hidden_size] f32.
struct TalkerRequest {
  std::vector<float> prompt;
  std::vector<float> text;  // a row a frame, added to the embedding of its codes
  std::vector<float> pad;   // [hidden_size]: the row of frames behind the text
  bool is_text_complete = true;
  CodeSampling sampling{};
  std::optional<std::uint64_t> seed{};  // none: fresh entropy
};

// The embeddings and the code predictor around the decoder of a talker, as a hook of the ModelRunner that runs it.
//
// The input at position p of a request is row p of what it has: its prompt, then a row a frame, the embeddings of the
// frame's codes and its row of text. The rows are kept, so any span of positions can be run again: a part of a prompt,
// one token, several, or everything after a preemption. No call of Python happens in a step.
class Talker : public StepHook {
 public:
  // `tensors`: those of the talker ("model.codec_embedding.weight", "text_projection...", "code_predictor...").
  Talker(const TalkerConfig& config, const StoredTensors& tensors, int max_num_reqs, int num_threads);
  ~Talker() override;

  // Throws InvalidArgument naming the field for rows of the wrong width, no prompt, an id in use.
  void add_request(const std::string& req_id, TalkerRequest request);
  // More rows of text for a request that was added without all of them.
  void append_text(const std::string& req_id, std::span<const float> rows, bool is_last);
  // Unknown ids are ignored.
  void remove_request(const std::string& req_id);

  // Tokens whose input exists, or will once the token before it is sampled; -1: no limit any more.
  int num_ready_tokens(const std::string& req_id) const;
  // Frames made so far. A frame of a control token (the end) is not made.
  int num_frames(const std::string& req_id) const;
  // Codes of frames [begin, num_frames): rows of num_codebooks.
  std::vector<std::int32_t> codes(const std::string& req_id, int begin) const;
  // Whether the request's residual logits were not finite.
  bool has_failed(const std::string& req_id) const;

  // Rows for prompts, [n, hidden_size] f32.
  std::vector<float> text_rows(std::span<const std::int32_t> text_ids) const;    // projected text embeddings
  std::vector<float> project_text(std::span<const float> embeddings) const;      // [n, text_hidden_size]
  std::vector<float> project_hidden(std::span<const float> hidden) const;        // [n, text_hidden_size]
  std::vector<float> codec_rows(std::span<const std::int32_t> codec_ids) const;  // of the talker's vocabulary
  std::vector<float> frame_rows(std::span<const std::int32_t> codes) const;      // [n, num_codebooks] codes

  const TalkerConfig& config() const;
  std::int64_t num_predictor_calls() const;  // one a step at most, for all its rows

  bool fills_embeddings() const override { return true; }
  void before_forward(const StepView& step) override;
  void after_sample(const StepView& step, std::span<const std::int32_t> token_ids) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

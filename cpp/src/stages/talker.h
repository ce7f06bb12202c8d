#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpp/src/stages/code_predictor.h"
#include "cpp/src/stages/stage_edge.h"
#include "cpp/src/stages/stage_runner.h"

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
  std::vector<float> text;   // a row a frame, added to the embedding of its codes
  std::vector<float> pad;    // [hidden_size]: the row of frames behind the text
  std::vector<float> end{};  // [hidden_size] or none: the row that take_text puts behind text that has ended
  bool is_text_complete = true;
  CodeSampling sampling{};
  std::optional<std::uint64_t> seed{};  // none: fresh entropy
};

// What a talker hands over: a row [num_codebooks] i32 for each token that it samples, the end of speech included.
inline const PayloadKey kCodesKey{"codes", "audio"};
// What it takes of a thinker: its hidden states, [text_hidden_size] f32.
inline const PayloadKey kTextKey{"hidden", "text"};

// The embeddings and the code predictor around the decoder of a talker: the stage that a ModelRunner runs it as.
//
// The input at position p of a request is row p of what it has: its prompt, then a row a frame, the embeddings of the
// frame's codes and its row of text. The rows are kept, so any span of positions can be run again: a part of a prompt,
// one token, several, or everything after a preemption. No call of Python happens in a step.
class Talker : public StageRunner {
 public:
  // `tensors`: those of the talker ("model.codec_embedding.weight", "text_projection...", "code_predictor..."). `codes`
  // takes what it hands over; may be null.
  Talker(const TalkerConfig& config, const StoredTensors& tensors, int max_num_reqs, int max_num_tokens,
         int num_threads, std::shared_ptr<StageEdge> codes);
  ~Talker() override;

  // Throws InvalidArgument naming the field for rows of the wrong width, no prompt, an id in use.
  void add_request(const std::string& req_id, TalkerRequest request);
  // More rows of text for a request that was added without all of them.
  void append_text(const std::string& req_id, std::span<const float> rows, bool is_last);
  // Takes the text that is due of all requests that have begun: hidden states of a thinker, projected in one go.
  // Returns what is not such text: of requests that have not begun, and ends in errors.
  std::vector<Delivery> take_text(StageEdge& text);
  // Hands over the codes that are not yet: those of a full edge, which stay here until the request ends.
  void hand_over(const std::string& req_id);
  // Unknown ids are ignored.
  void remove_request(const std::string& req_id);
  std::size_t num_requests() const;

  // Of the requests for which it has changed since the last call: tokens whose input exists, or will once the token
  // before it is sampled; -1: no limit any more.
  std::map<std::string, int> take_ready_tokens();

  // Rows for prompts, [n, hidden_size] f32.
  std::vector<float> text_rows(std::span<const std::int32_t> text_ids) const;    // projected text embeddings
  std::vector<float> project_text(std::span<const float> embeddings) const;      // [n, text_hidden_size]
  std::vector<float> project_hidden(std::span<const float> hidden) const;        // [n, text_hidden_size]
  std::vector<float> codec_rows(std::span<const std::int32_t> codec_ids) const;  // of the talker's vocabulary
  std::vector<float> frame_rows(std::span<const std::int32_t> codes) const;      // [n, num_codebooks] codes

  const TalkerConfig& config() const;
  std::int64_t num_predictor_calls() const;  // one a step at most, for all its rows

  bool has_batched_hook() const override { return true; }
  std::optional<std::string> preprocess(std::span<const StepRow> rows, bool is_batched, TensorView ids,
                                        TensorView embeds) override;
  void after_sample(const StepView& step, std::span<const std::int32_t> token_ids) override;

 private:
  void make_frames(std::span<const std::int32_t> first_codes);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

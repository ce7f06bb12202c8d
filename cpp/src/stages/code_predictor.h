#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <deltaic/config.h>

#include "cpp/src/loader/safetensors.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// How residual codes are chosen.
struct CodeSampling {
  bool do_sample = true;  // false: the most likely code
  float temperature = 0.9F;
  int top_k = 50;  // 0: off
  float top_p = 1.0F;
};
// Throws InvalidArgument naming the field.
void validate(const CodeSampling& sampling);

struct CodePredictorConfig {
  ModelConfig decoder;         // vocab_size: codes a codebook; full attention alone
  int num_codebooks = 0;       // Q, with the first one, which the talker chooses
  int talker_hidden_size = 0;  // width of what goes in and of the codes' embeddings
};

// One frame of one request.
struct CodeRow {
  CodeSampling sampling{};
  std::uint64_t seed = 0;
  std::uint64_t frame = 0;
};

// The residual codes of a frame: Q - 1 short forwards over a sequence that starts with [talker hidden state, embedding
// of the first code]; codebook i is chosen by head i - 1 and appended by embedding i - 1. Random numbers are a function
// of (seed, frame, codebook): a row gives the same codes alone and in any batch. All arithmetic is in f32.
class CodePredictor {
 public:
  // `tensors`: those of the predictor ("model.layers.0...", "model.codec_embedding.0.weight", "lm_head.0.weight" and,
  // where the widths differ, "small_to_mtp_projection.weight" and ".bias"). Throws as load_decoder_weights, and
  // Unsupported for a decoder with recurrent layers.
  CodePredictor(const CodePredictorConfig& config, const StoredTensors& tensors, const ops::Context& ctx,
                int max_batch);
  ~CodePredictor();
  CodePredictor(CodePredictor&&) noexcept;

  // For rows [0, B), B <= max_batch:
  //   hidden      [B, talker_hidden_size] f32: the talker's last hidden states, after its final norm
  //   first_code  [B, talker_hidden_size] f32: embeddings of the first codes
  //   codes       [B, Q - 1] i32, out
  //   sum         [B, talker_hidden_size] f32, out: the embeddings of all Q codes of the frame, added up
  // Returns which rows had finite logits; the codes of others are 0 from there on.
  std::vector<bool> predict(TensorView hidden, TensorView first_code, std::span<const CodeRow> rows, TensorView codes,
                            TensorView sum);

  // The embedding table of codebook i + 1: [codes, talker_hidden_size].
  const ops::Weight& embedding(int i) const;
  const CodePredictorConfig& config() const;
  std::int64_t num_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

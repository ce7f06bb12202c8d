#pragma once

#include <memory>

#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/hybrid_decoder.h"

namespace deltaic {

// The draft module of a model (docs/models.md, "Draft module"): a full-attention layer with its own K/V cache, which
// reads the embedding of a token beside the hidden state in front of it, and predicts the token behind. It has no
// recurrent state.
class MtpModule {
 public:
  // Allocates the activations of the largest pass once, here.
  //   config  of the whole model
  MtpModule(const ModelConfig& config, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
            const DecoderLimits& limits);

  // Token t of the pass is what follows position positions[t], and row hidden_rows[t] of `hidden_states` is the hidden
  // state at that position: of the model after its final norm, or what this returned for the position before. Its K and
  // V go to slot_mapping[t].
  //   inputs         as of the model's forward, over the tokens of this pass; gdn is unused
  //   hidden_states  [num_rows, hidden_size]; may be what this returned last
  //   hidden_rows    [num_tokens] i32
  // Returns [num_tokens, hidden_size] after mtp.norm, valid until the next call.
  TensorView forward(const ForwardInputs& inputs, const TensorView& hidden_states, const TensorView& hidden_rows,
                     const AttentionCacheViews& cache);

  // As HybridDecoder's, of what forward returned.
  void compute_logits(const TensorView& hidden_states, const TensorView& row_indices, TensorView logits) {
    decoder_.compute_logits(hidden_states, row_indices, logits);
  }

 private:
  float eps_;
  std::int64_t hidden_size_;
  std::shared_ptr<const MtpWeights> weights_;
  ops::Context ctx_;
  HybridDecoder decoder_;
  Tensor gathered_;  // [max_num_tokens, hidden_size]: embeddings, then hidden states
  Tensor joined_;    // [max_num_tokens, 2 * hidden_size]: both, normed
};

}  // namespace deltaic

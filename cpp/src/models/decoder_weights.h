#pragma once

#include <memory>
#include <variant>
#include <vector>

#include <deltaic/config.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/layers/attention.h"
#include "cpp/src/layers/gated_delta_net.h"
#include "cpp/src/layers/mlp.h"
#include "cpp/src/layers/moe.h"
#include "cpp/src/loader/checkpoint.h"

namespace deltaic {

struct DecoderLayer {
  Tensor input_norm, post_attention_norm;  // [hidden_size] f32, what the norm multiplies with
  std::variant<Attention, GatedDeltaNet> mixer;
  std::variant<Mlp, Moe> feed_forward;
};

// Where weights go and as what.
struct WeightPlacement {
  Device device{};
  DType dtype = DType::bf16;  // CUDA: of matrices, and so of activations. On the CPU matrices stay as they are stored
};

// All weights of a text model. Matrices are views of the checkpoint, which they keep mapped (or which the caller keeps
// in memory); small vectors are f32 copies.
struct DecoderWeights {
  WeightPlacement placement;
  ops::Weight embedding;  // [vocab_size, hidden_size]
  ops::Weight head;       // [vocab_size, hidden_size]; the embedding when tied
  Tensor final_norm;
  std::vector<DecoderLayer> layers;
  std::int64_t num_bytes = 0;  // of the above, each tensor once
  int num_mtp_layers = 0;      // layers of the draft module that the checkpoint has
};

// Takes the tensors that `config` asks for, by the names and shapes of model-spec section 4; others are skipped.
// Throws InvalidArgument naming the tensor for one that is missing or has another shape, Unsupported for its dtype.
std::shared_ptr<const DecoderWeights> load_decoder_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                           WeightPlacement placement = {});

}  // namespace deltaic

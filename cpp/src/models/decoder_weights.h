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
#include "cpp/src/models/weight_placement.h"

namespace deltaic {

struct DecoderLayer {
  Tensor input_norm, post_attention_norm;  // [hidden_size] f32, what the norm multiplies with
  std::variant<Attention, GatedDeltaNet> mixer;
  std::variant<Mlp, Moe> feed_forward;
};

// All weights of a text model. On the CPU matrices are views of the checkpoint, which they keep mapped (or which the
// caller keeps in memory); on CUDA they are in device memory, matrices of one input fused. Small vectors are f32
// copies.
struct DecoderWeights {
  WeightPlacement placement;
  ops::Weight embedding;  // [vocab_size, hidden_size]
  ops::Weight head;       // [vocab_size, hidden_size]; the embedding when tied
  Tensor final_norm;
  std::vector<DecoderLayer> layers;
  std::int64_t num_bytes = 0;  // of the above, each tensor once
  int num_mtp_layers = 0;      // layers of the draft module that the checkpoint has
};

// Takes the tensors that `config` asks for, by the names and shapes of docs/models.md, "Tensor names"; others are
// skipped. On CUDA matrices go through pinned memory, converted on the device; it returns when all have arrived. Throws
// InvalidArgument naming the tensor for one that is missing or has another shape, Unsupported for its dtype,
// OutOfMemory where the device has too little.
std::shared_ptr<const DecoderWeights> load_decoder_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                           WeightPlacement placement = {});

// The same structure with random values that follow from the seed, the same on every device; on CUDA kernels write
// them.
std::shared_ptr<const DecoderWeights> make_dummy_weights(const ModelConfig& config, WeightPlacement placement,
                                                         std::uint64_t seed);

// The draft module (docs/models.md, "Draft module"): what it reads, and its layer and final norm as a decoder of one
// layer with the embedding and the head of the model.
struct MtpWeights {
  Tensor embedding_norm, hidden_norm;  // [hidden_size] f32
  ops::Weight fc;                      // [hidden_size, 2 * hidden_size]
  DecoderWeights block;                // num_bytes: of the module's own tensors
};

// Takes the mtp.* tensors, placed like the target's. Throws as load_decoder_weights does, Unsupported where there is
// not exactly one layer.
std::shared_ptr<const MtpWeights> load_mtp_weights(const ModelConfig& config, const Checkpoint& checkpoint,
                                                   const DecoderWeights& target);

// The same with random values, as make_dummy_weights makes them. Throws Unsupported for a config without the module.
std::shared_ptr<const MtpWeights> make_dummy_mtp_weights(const ModelConfig& config, const DecoderWeights& target,
                                                         std::uint64_t seed);

// Layers of the draft module that a checkpoint has.
int count_mtp_layers(const Checkpoint& checkpoint);

}  // namespace deltaic

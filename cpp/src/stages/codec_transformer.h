#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/src/ops/rotary.h"
#include "cpp/src/stages/stage_tensors.h"
#include "cpp/src/stages/streaming_conv.h"

namespace deltaic {

struct CodecTransformerConfig {
  int hidden_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int intermediate_size = 0;
  int sliding_window = 0;  // positions that a query sees, itself included
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-5;
};

// The causal transformer of a codec decoder: sliding-window attention, rotary embedding, layer scale, SwiGLU. A stream
// keeps the keys and values of the last sliding_window - 1 positions.
class CodecTransformer {
 public:
  // Names under "pre_transformer.". input_proj and output_proj are used where the checkpoint has them.
  static CodecTransformer read(WeightReader& reader, StateLayout& layout, const CodecTransformerConfig& config,
                               std::int64_t outer_size);
  // x: [length, outer_size]; so is the result.
  Signal forward(const ops::Context& ctx, StreamState& state, Signal x) const;

 private:
  struct Layer {
    Tensor input_norm, post_attention_norm, attention_scale, mlp_scale;
    StageLinear q, k, v, o, gate, up, down;
    int state = 0;  // keys and values of the past, the oldest first
  };
  void attend(const ops::Context& ctx, const Layer& layer, StreamState& state, Signal& x) const;
  void rotate(Signal& rows, std::int64_t first_position) const;

  CodecTransformerConfig config_;
  std::vector<float> inv_freq_;  // [head_dim / 2]
  std::vector<Layer> layers_;
  Tensor norm_;
  StageLinear input_, output_;
  std::int64_t outer_size_ = 0;
};

}  // namespace deltaic

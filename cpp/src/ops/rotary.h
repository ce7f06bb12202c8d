#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <deltaic/config.h>

#include "cpp/src/ops/context.h"

namespace deltaic {

namespace ops {

// What rotary embedding needs of a model, computed once: frequencies in f32 as transformers computes them.
struct RotaryTable {
  int rotary_dim = 0;                // channels that rotate; pairs are (j, j + rotary_dim / 2)
  std::vector<float> inv_freq;       // [rotary_dim / 2]
  std::vector<std::uint8_t> stream;  // [rotary_dim / 2] which position stream frequency j uses: 0, 1 or 2
  float attention_factor = 1.0F;     // cos and sin are multiplied by it (yarn)
};
// docs/models.md, "Rotary embedding".
RotaryTable make_rotary_table(const ModelConfig& model);

struct QkNormRopeArgs {
  // q, k and v: f32 on the CPU; f32, f16 or bf16 of one dtype on CUDA.
  TensorView q;  // [num_tokens, num_heads, head_dim], any token and head stride; normed and rotated in place
  TensorView k;  // [num_tokens, num_kv_heads, head_dim], likewise
  TensorView v;  // [num_tokens, num_kv_heads, head_dim]
  TensorView q_norm_weight;  // [head_dim] f32
  TensorView k_norm_weight;  // [head_dim] f32
  float eps = 1e-6F;
  const RotaryTable* rotary = nullptr;  // on the host; CUDA passes it as a kernel parameter, a graph keeps its values
  TensorView positions;                 // [num_streams, num_tokens] i64 with 1 or 3 streams
  TensorView slot_mapping;              // [num_tokens] i64; -1 writes nothing
  TensorView k_cache;  // [num_blocks, block_size, num_kv_heads, head_dim] f32 | f16 | bf16, any block stride
  TensorView v_cache;  // on CUDA of k_cache's dtype
};
// q = rope(norm(q)), k = rope(norm(k)) per head, in f32 until the store; k and v are stored in the cache at
// slot_mapping. The CPU checks slots against the cache, CUDA does not.
void qk_norm_rope(const Context& ctx, const QkNormRopeArgs& args);

}  // namespace ops

namespace cpu {
void qk_norm_rope(ThreadPool& threads, const ops::QkNormRopeArgs& args);
}
namespace cuda {
void qk_norm_rope(ops::Stream stream, const ops::QkNormRopeArgs& args);
}

}  // namespace deltaic

#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <deltaic/config.h>
#include <deltaic/tensor.h>

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/gated_delta_net.h"

namespace deltaic {

struct DecoderWeights;  // models/decoder_weights.h

// What a forward reads beside the weights. All views are on the context's device.
struct ForwardInputs {
  TensorView input_ids;        // [num_tokens] i32
  TensorView positions;        // [num_streams, num_tokens] i64 with 1 or 3 streams
  TensorView query_start_loc;  // [num_reqs + 1] i32
  TensorView seq_lens;         // [num_reqs] i32
  TensorView block_table;      // [num_reqs, row_stride] i32
  TensorView slot_mapping;     // [num_tokens] i64
  ops::GdnSequences gdn;       // unused without GDN layers
};

// The caches a forward reads and writes: one entry a layer of that kind, in layer order.
struct AttentionCacheViews {
  TensorView k, v;  // [num_blocks, block_size, num_kv_heads, head_dim]
};
struct StateCacheViews {
  TensorView conv;      // [num_slots, conv_dim, conv_kernel - 1 + S]
  TensorView temporal;  // [num_slots, num_value_heads, value_head_dim, key_head_dim]
};
struct CacheViews {
  std::span<const AttentionCacheViews> attention;
  std::span<const StateCacheViews> state;
};

// One decoder for all five architectures: a list of layers, each (GDN or full attention) x (dense MLP or MoE).
class HybridDecoder {
 public:
  // Allocates the activations for max_num_tokens tokens once, here.
  HybridDecoder(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights, const ops::Context& ctx,
                int max_num_tokens);
  ~HybridDecoder();
  HybridDecoder(HybridDecoder&&) noexcept;
  HybridDecoder& operator=(HybridDecoder&&) noexcept;

  // Called with 0 for the embedding output, i + 1 for the residual stream after layer i, num_layers + 1 for the output
  // of the final norm. The view is valid during the call alone.
  using Observer = std::function<void(int index, const TensorView& hidden)>;

  // Runs the layers and the final norm over at most max_num_tokens tokens. Returns [num_tokens, hidden_size] f32 (CPU),
  // valid until the next forward.
  TensorView forward(const ForwardInputs& inputs, const CacheViews& caches, const Observer& observer = {});

  // logits [num_rows, vocab_size] f32 of the rows of hidden_states that row_indices names.
  //   hidden_states  what forward returned
  //   row_indices    [num_rows] i32, on the host
  void compute_logits(const TensorView& hidden_states, std::span<const std::int32_t> row_indices, TensorView logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

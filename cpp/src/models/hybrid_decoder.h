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

// What a forward reads beside the weights. All views are on the context's device. A padding row of a captured batch has
// one token: id 0, position 0, slot -1, state index -1, seq_len 0 or 1; it changes no other row.
struct ForwardInputs {
  TensorView input_ids;        // [num_tokens] i32
  TensorView positions;        // [num_streams, num_tokens] i64 with 1 or 3 streams
  TensorView query_start_loc;  // [num_reqs + 1] i32
  TensorView seq_lens;         // [num_reqs] i32
  TensorView block_table;      // [num_reqs, row_stride] i32
  TensorView slot_mapping;     // [num_tokens] i64
  ops::GdnSequences gdn;       // unused without GDN layers
  // none: input_ids are embedded; else [num_tokens, hidden_size]: f32 on the CPU, what embeddings() gave on CUDA
  TensorView inputs_embeds{};

  // What the host knows of the lengths, with the meaning and the defaults of PagedAttentionArgs: limits, in a graph.
  int num_decodes = 0;
  int max_decode_query_len = 1;
  int max_query_len = 0;
  int max_seq_len = 0;
};

// The caches a forward reads and writes: one entry a layer of that kind, in layer order.
struct AttentionCacheViews {
  TensorView k, v;  // [num_blocks, block_size, num_kv_heads, head_dim]
};
struct StateCacheViews {
  TensorView conv;      // [num_slots, conv_dim, conv_kernel - 1 + S]
  TensorView temporal;  // [num_slots, num_value_heads, value_head_dim, key_head_dim]
  TensorView replay{};  // [num_running_slots, 1 + S, GdnShape::replay_size()] f32; without S none
};
struct CacheViews {
  std::span<const AttentionCacheViews> attention;
  std::span<const StateCacheViews> state;
};

// The largest step that a decoder is made for.
struct DecoderLimits {
  int max_num_tokens = 0;
  int max_num_seqs = 0;     // 0: as many as tokens
  int max_model_len = 0;    // CUDA, with max_num_decodes
  int max_num_decodes = 0;  // CUDA: of ForwardInputs::num_decodes
  int max_decode_query_len = 1;
};

// One decoder for all five architectures: a list of layers, each (GDN or full attention) x (dense MLP or MoE).
class HybridDecoder {
 public:
  // Allocates the activations for the largest step once, here.
  HybridDecoder(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights, const ops::Context& ctx,
                const DecoderLimits& limits);
  ~HybridDecoder();
  HybridDecoder(HybridDecoder&&) noexcept;
  HybridDecoder& operator=(HybridDecoder&&) noexcept;

  // [num_tokens, hidden_size] of the dtype that forward returns: where the input of the first layer may be written, to
  // be passed as inputs_embeds to the next forward, with no compute_logits between.
  TensorView embeddings(std::int64_t num_tokens) const;

  // Called with 0 for the embedding output, i + 1 for the residual stream after layer i, num_layers + 1 for the output
  // of the final norm. The view is valid during the call alone.
  using Observer = std::function<void(int index, const TensorView& hidden)>;

  // Runs the layers and the final norm over at most max_num_tokens tokens. Returns [num_tokens, hidden_size], f32 on
  // the CPU and the dtype of the weights on CUDA, valid until the next forward. On CUDA it enqueues alone, and can be
  // captured in a graph once a step of as many tokens ran without.
  TensorView forward(const ForwardInputs& inputs, const CacheViews& caches, const Observer& observer = {});

  // logits [num_rows, vocab_size] f32 of the rows of hidden_states that row_indices names.
  //   hidden_states  what forward returned
  //   row_indices    [num_rows] i32, on the context's device; the CPU checks them, CUDA does not
  void compute_logits(const TensorView& hidden_states, const TensorView& row_indices, TensorView logits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltaic

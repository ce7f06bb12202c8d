#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/hybrid_decoder.h"

namespace deltaic::test {

// Runs a decoder over caches that start full of NaN, with scattered blocks and slots: what the runner does, in little.
class DecoderSession {
 public:
  static constexpr int kBlockSize = 8;
  static constexpr int kMaxBlocks = 128;  // of one sequence
  static constexpr int kMaxTokens = 1100;

  struct Chunk {
    int sequence = 0;
    std::vector<std::int32_t> tokens;
  };

  DecoderSession(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights, int num_sequences,
                 int max_num_tokens = kMaxTokens)
      : config_(config),
        ctx_{.device = {}, .stream = {}, .threads = &threads_},
        decoder_(config, std::move(weights), ctx_, {.max_num_tokens = max_num_tokens}),
        num_computed_(num_sequences) {
    const std::int64_t num_blocks = std::int64_t{num_sequences} * kMaxBlocks, num_slots = num_sequences + 2;
    for (const LayerKind kind : config.layer_kinds)
      if (kind == LayerKind::full_attention) {
        const TensorView k = poisoned({num_blocks, kBlockSize, config.num_kv_heads, config.head_dim});
        attention_.push_back({k, poisoned({num_blocks, kBlockSize, config.num_kv_heads, config.head_dim})});
      } else {
        const TensorView conv = poisoned({num_slots, config.conv_dim(), config.linear_conv_kernel_dim - 1});
        state_.push_back({conv, poisoned({num_slots, config.linear_num_value_heads, config.linear_value_head_dim,
                                          config.linear_key_head_dim})});
      }
  }

  // Runs the chunks as one step. Logits of the last token of each, [num_chunks][vocab_size].
  std::vector<std::vector<float>> step(const std::vector<Chunk>& chunks) {
    std::vector<std::int32_t> ids, query_start_loc{0}, seq_lens, block_table, slots, last_rows;
    std::vector<std::int64_t> positions, slot_mapping;
    std::vector<std::uint8_t> has_initial_state;
    for (const Chunk& chunk : chunks) {
      int& computed = num_computed_[chunk.sequence];
      has_initial_state.push_back(computed > 0);
      for (const std::int32_t token : chunk.tokens) {
        ids.push_back(token);
        positions.push_back(computed);
        slot_mapping.push_back(std::int64_t{block(chunk.sequence, computed / kBlockSize)} * kBlockSize +
                               computed % kBlockSize);
        ++computed;
      }
      query_start_loc.push_back(static_cast<std::int32_t>(ids.size()));
      last_rows.push_back(static_cast<std::int32_t>(ids.size()) - 1);
      seq_lens.push_back(computed);
      for (int i = 0; i < kMaxBlocks; ++i) block_table.push_back(block(chunk.sequence, i));
      slots.push_back(slot(chunk.sequence));
    }
    const auto num_tokens = static_cast<std::int64_t>(ids.size()), num_reqs = static_cast<std::int64_t>(chunks.size());
    const TensorView starts = make_view(query_start_loc.data(), DType::i32, {num_reqs + 1});
    const ForwardInputs inputs{
        .input_ids = make_view(ids.data(), DType::i32, {num_tokens}),
        .positions = make_view(positions.data(), DType::i64, {1, num_tokens}),
        .query_start_loc = starts,
        .seq_lens = make_view(seq_lens.data(), DType::i32, {num_reqs}),
        .block_table = make_view(block_table.data(), DType::i32, {num_reqs, kMaxBlocks}),
        .slot_mapping = make_view(slot_mapping.data(), DType::i64, {num_tokens}),
        .gdn = {.query_start_loc = starts,
                .state_indices = make_view(slots.data(), DType::i32, {num_reqs}),
                .has_initial_state = make_view(has_initial_state.data(), DType::u8, {num_reqs})}};
    const TensorView hidden = decoder_.forward(inputs, {.attention = attention_, .state = state_});
    std::vector<float> logits(chunks.size() * static_cast<std::size_t>(config_.vocab_size));
    decoder_.compute_logits(hidden, make_view(last_rows.data(), DType::i32, {num_reqs}),
                            make_view(logits.data(), DType::f32, {num_reqs, config_.vocab_size}));
    std::vector<std::vector<float>> result;
    for (std::size_t i = 0; i < chunks.size(); ++i)
      result.emplace_back(logits.begin() + static_cast<std::ptrdiff_t>(i) * config_.vocab_size,
                          logits.begin() + static_cast<std::ptrdiff_t>(i + 1) * config_.vocab_size);
    return result;
  }

  // One sequence's tokens, cut into chunks of these sizes; the logits of the last token.
  std::vector<float> run(int sequence, const std::vector<std::int32_t>& tokens, const std::vector<int>& sizes) {
    std::vector<float> logits;
    auto begin = tokens.begin();
    for (const int size : sizes) {
      logits = step({{sequence, {begin, begin + size}}}).front();
      begin += size;
    }
    return logits;
  }

  // The conv and temporal states of a sequence, all layers after another.
  std::vector<float> states(int sequence) const {
    std::vector<float> result;
    for (const StateCacheViews& layer : state_)
      for (const TensorView& view : {layer.conv, layer.temporal}) {
        const TensorView row = view.slice(slot(sequence), slot(sequence) + 1);
        result.insert(result.end(), row.as<float>(), row.as<float>() + row.numel());
      }
    return result;
  }

  HybridDecoder& decoder() { return decoder_; }

 private:
  // Blocks of sequences lie in turns, and backwards.
  int block(int sequence, int index) const {
    const int num_sequences = static_cast<int>(num_computed_.size());
    return (kMaxBlocks - 1 - index) * num_sequences + sequence;
  }
  int slot(int sequence) const { return static_cast<int>(num_computed_.size()) - sequence; }

  TensorView poisoned(std::initializer_list<std::int64_t> shape) {
    const TensorView& view = memory_.emplace_back(DType::f32, shape).view();
    std::fill_n(view.as<float>(), view.numel(), std::numeric_limits<float>::quiet_NaN());
    return view;
  }

  ModelConfig config_;
  ThreadPool threads_{2};
  ops::Context ctx_;
  HybridDecoder decoder_;
  std::vector<int> num_computed_;
  std::vector<Tensor> memory_;
  std::vector<AttentionCacheViews> attention_;
  std::vector<StateCacheViews> state_;
};

}  // namespace deltaic::test

#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/half.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "tests_cpp/support/tensors.h"

namespace deltaic::test {

// Runs a decoder over caches that start full of NaN, with scattered blocks and slots: what the runner does, in little.
// It runs where the weights are.
class DecoderSession {
 public:
  static constexpr int kBlockSize = 16;
  static constexpr int kMaxBlocks = 72;  // of one sequence
  static constexpr int kMaxTokens = 1100;

  struct Chunk {
    int sequence = 0;
    std::vector<std::int32_t> tokens;
  };

  DecoderSession(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights, int num_sequences,
                 int max_num_tokens = kMaxTokens)
      : config_(config),
        device_(weights->placement.device),
        dtype_(is_on_cuda() ? weights->placement.dtype : DType::f32),
        num_computed_(num_sequences) {
    if (is_on_cuda()) {
      stream_.emplace();
      matmul_ = cuda::make_matmul(device_.index);
    }
    ctx_ = {.device = device_,
            .stream = {stream_ ? stream_->handle() : nullptr},
            .threads = &threads_,
            .matmul = matmul_.get()};
    decoder_.emplace(config, std::move(weights), ctx_,
                     DecoderLimits{.max_num_tokens = max_num_tokens,
                                   .max_model_len = kBlockSize * kMaxBlocks,
                                   .max_num_decodes = num_sequences + kMaxPadding});
    const std::int64_t num_blocks = std::int64_t{num_sequences} * kMaxBlocks, num_slots = num_sequences + 2;
    for (const LayerKind kind : config.layer_kinds)
      if (kind == LayerKind::full_attention) {
        const TensorView k = poisoned(dtype_, {num_blocks, kBlockSize, config.num_kv_heads, config.head_dim});
        attention_.push_back({k, poisoned(dtype_, {num_blocks, kBlockSize, config.num_kv_heads, config.head_dim})});
      } else {
        const TensorView conv = poisoned(dtype_, {num_slots, config.conv_dim(), config.linear_conv_kernel_dim - 1});
        state_.push_back({conv, poisoned(DType::f32, {num_slots, config.linear_num_value_heads,
                                                      config.linear_value_head_dim, config.linear_key_head_dim})});
      }
  }

  // Runs the chunks as one step, and num_padding rows of padding behind them. Logits of the last token of each,
  // [num_chunks][vocab_size]. Chunks of one token at the front are decodes.
  std::vector<std::vector<float>> step(const std::vector<Chunk>& chunks, int num_padding = 0, int padding_len = 1) {
    prepare(chunks, num_padding, padding_len);
    enqueue();
    return logits();
  }

  // The parts of step(): what a captured graph reads, the work, and what it gave.
  void prepare(const std::vector<Chunk>& chunks, int num_padding = 0, int padding_len = 1) {
    std::vector<std::int32_t> ids, query_start_loc{0}, seq_lens, block_table, slots, last_rows;
    std::vector<std::int64_t> positions, slot_mapping;
    std::vector<std::uint8_t> has_initial_state;
    int num_decodes = 0, max_query_len = 1, max_seq_len = 1;
    for (const Chunk& chunk : chunks) {
      int& computed = num_computed_[chunk.sequence];
      if (chunk.tokens.size() == 1 && num_decodes == static_cast<int>(seq_lens.size())) ++num_decodes;
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
      max_query_len = std::max(max_query_len, static_cast<int>(chunk.tokens.size()));
      max_seq_len = std::max(max_seq_len, computed);
      for (int i = 0; i < kMaxBlocks; ++i) block_table.push_back(block(chunk.sequence, i));
      slots.push_back(slot(chunk.sequence));
    }
    for (int i = 0; i < num_padding; ++i) {
      ids.push_back(0), positions.push_back(0), slot_mapping.push_back(-1), has_initial_state.push_back(0);
      query_start_loc.push_back(static_cast<std::int32_t>(ids.size()));
      last_rows.push_back(static_cast<std::int32_t>(ids.size()) - 1);
      seq_lens.push_back(padding_len);
      block_table.insert(block_table.end(), kMaxBlocks, 0);
      slots.push_back(-1);
    }
    if (num_decodes == static_cast<int>(chunks.size())) num_decodes += num_padding;
    const auto num_tokens = static_cast<std::int64_t>(ids.size()), num_reqs = static_cast<std::int64_t>(slots.size());
    num_placed_ = 0;
    const TensorView starts = placed(ints(query_start_loc));
    rows_ = placed(ints(last_rows));
    inputs_ = {.input_ids = placed(ints(ids)),
               .positions = placed(longs(positions)).reshape({1, num_tokens}),
               .query_start_loc = starts,
               .seq_lens = placed(ints(seq_lens)),
               .block_table = placed(ints(block_table)).reshape({num_reqs, kMaxBlocks}),
               .slot_mapping = placed(longs(slot_mapping)),
               .gdn = {.query_start_loc = starts,
                       .state_indices = placed(ints(slots)),
                       .has_initial_state = placed(bytes(has_initial_state)),
                       .num_decodes = num_decodes},
               .num_decodes = num_decodes,
               .max_query_len = max_query_len,
               .max_seq_len = max_seq_len};
    logits_ = placed(filled({num_reqs, config_.vocab_size}, DType::f32, std::numeric_limits<double>::quiet_NaN()));
    num_chunks_ = chunks.size();
  }
  void enqueue() {
    const TensorView hidden = decoder_->forward(inputs_, {.attention = attention_, .state = state_});
    decoder_->compute_logits(hidden, rows_, logits_);
  }
  std::vector<std::vector<float>> logits() const {
    const std::vector<float> all = on_host(logits_);
    std::vector<std::vector<float>> result;
    for (std::size_t i = 0; i < num_chunks_; ++i)
      result.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(i) * config_.vocab_size,
                          all.begin() + static_cast<std::ptrdiff_t>(i + 1) * config_.vocab_size);
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
        const auto row = on_host(view.slice(slot(sequence), slot(sequence) + 1));
        result.insert(result.end(), row.begin(), row.end());
      }
    return result;
  }

  HybridDecoder& decoder() { return *decoder_; }
  const cuda::Stream& stream() const { return *stream_; }

 private:
  static constexpr int kMaxPadding = 16;

  bool is_on_cuda() const { return device_.type == DeviceType::cuda; }

  // Blocks of sequences lie in turns, and backwards.
  int block(int sequence, int index) const {
    const int num_sequences = static_cast<int>(num_computed_.size());
    return (kMaxBlocks - 1 - index) * num_sequences + sequence;
  }
  int slot(int sequence) const { return static_cast<int>(num_computed_.size()) - sequence; }

  TensorView poisoned(DType dtype, std::initializer_list<std::int64_t> shape) {
    const Tensor host(dtype, shape);
    std::memset(host.view().data, 0xFF, host.view().num_bytes());  // NaN in every dtype
    return memory_.emplace_back(copy_to(host, device_)).view();
  }
  // In memory that is kept from step to step: allocating is slow on some machines.
  TensorView placed(const Tensor& host) {
    TensorView view = host.view();
    if (num_placed_ == step_memory_.size()) step_memory_.emplace_back();
    Buffer& buffer = step_memory_[num_placed_++];
    if (buffer.num_bytes() < view.num_bytes()) buffer = Buffer(2 * view.num_bytes(), device_);
    if (is_on_cuda())
      cuda::copy_and_wait(buffer.data(), view.data, view.num_bytes());
    else
      std::memcpy(buffer.data(), view.data, view.num_bytes());
    view.data = buffer.data();
    view.device = device_;
    return view;
  }
  std::vector<float> on_host(const TensorView& view) const {
    std::vector<char> data(view.num_bytes());
    if (is_on_cuda())
      cuda::copy_and_wait(data.data(), view.data, data.size());
    else
      std::memcpy(data.data(), view.data, data.size());
    std::vector<float> result;
    for (std::size_t i = 0; i < data.size(); i += size_of(view.dtype)) result.push_back(to_f32(&data[i], view.dtype));
    return result;
  }

  ModelConfig config_;
  Device device_;
  DType dtype_;
  ThreadPool threads_{2};
  std::optional<cuda::Stream> stream_;
  std::shared_ptr<cuda::Matmul> matmul_;
  ops::Context ctx_;
  std::optional<HybridDecoder> decoder_;
  std::vector<int> num_computed_;
  std::list<Tensor> memory_;
  std::vector<Buffer> step_memory_;
  std::size_t num_placed_ = 0;
  std::vector<AttentionCacheViews> attention_;
  std::vector<StateCacheViews> state_;
  ForwardInputs inputs_;
  TensorView rows_, logits_;
  std::size_t num_chunks_ = 0;
};

}  // namespace deltaic::test

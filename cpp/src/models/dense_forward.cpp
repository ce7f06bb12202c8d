#include "cpp/src/models/dense_forward.h"

#include <algorithm>
#include <numeric>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"

namespace deltaic {

namespace {

constexpr int kBlockSize = 16;

// The positions of one sequence, [num_streams, num_tokens].
std::vector<std::int64_t> complete_positions(std::span<const std::int64_t> positions, std::size_t num_tokens) {
  if (positions.empty()) {
    std::vector<std::int64_t> counted(num_tokens);
    std::iota(counted.begin(), counted.end(), std::int64_t{0});
    return counted;
  }
  DELTAIC_CHECK(positions.size() == num_tokens || positions.size() == 3 * num_tokens, positions.size(),
                " positions for ", num_tokens, " tokens, wanted 1 or 3 a token");
  for (const std::int64_t position : positions) DELTAIC_CHECK(position >= 0, "a position is ", position, ", below 0");
  return {positions.begin(), positions.end()};
}

// Caches for one sequence and no more.
struct PrivateCaches {
  std::vector<Tensor> memory;
  std::vector<AttentionCacheViews> attention;
  std::vector<StateCacheViews> state;

  PrivateCaches(const ModelConfig& config, std::int64_t num_blocks, Device device) {
    const auto make = [&](std::initializer_list<std::int64_t> shape) {
      return memory.emplace_back(DType::f32, shape, device).view();
    };
    for (const LayerKind kind : config.layer_kinds)
      if (kind == LayerKind::full_attention) {
        const TensorView k = make({num_blocks, kBlockSize, config.num_kv_heads, config.head_dim});
        attention.push_back({.k = k, .v = make({num_blocks, kBlockSize, config.num_kv_heads, config.head_dim})});
      } else {
        const TensorView conv = make({1, config.conv_dim(), config.linear_conv_kernel_dim - 1});
        state.push_back({.conv = conv,
                         .temporal = make({1, config.linear_num_value_heads, config.linear_value_head_dim,
                                           config.linear_key_head_dim})});
      }
  }
};

}  // namespace

DenseForwardOutput dense_forward(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights,
                                 const ops::Context& ctx, std::span<const std::int32_t> token_ids, bool with_hidden,
                                 std::span<const std::int64_t> positions) {
  const auto num_tokens = static_cast<std::int64_t>(token_ids.size());
  DELTAIC_CHECK(num_tokens > 0, "no tokens");
  for (const std::int32_t id : token_ids)
    DELTAIC_CHECK(0 <= id && id < config.vocab_size, "token id ", id, " is outside the vocabulary of ",
                  config.vocab_size);

  const std::int64_t num_blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
  std::vector<std::int32_t> ids(token_ids.begin(), token_ids.end());
  std::vector<std::int64_t> all_positions = complete_positions(positions, token_ids.size());
  std::vector<std::int32_t> query_start_loc{0, static_cast<std::int32_t>(num_tokens)};
  std::vector<std::int32_t> seq_lens{static_cast<std::int32_t>(num_tokens)};
  std::vector<std::int32_t> block_table(static_cast<std::size_t>(num_blocks));
  std::iota(block_table.begin(), block_table.end(), 0);
  std::vector<std::int64_t> slot_mapping(token_ids.size());
  std::iota(slot_mapping.begin(), slot_mapping.end(), std::int64_t{0});
  std::vector<std::int32_t> state_indices{0};
  std::vector<std::uint8_t> has_initial_state{0};

  const auto num_streams = static_cast<std::int64_t>(all_positions.size()) / num_tokens;
  const TensorView query_starts = make_view(query_start_loc.data(), DType::i32, {2});
  const ForwardInputs inputs{.input_ids = make_view(ids.data(), DType::i32, {num_tokens}),
                             .positions = make_view(all_positions.data(), DType::i64, {num_streams, num_tokens}),
                             .query_start_loc = query_starts,
                             .seq_lens = make_view(seq_lens.data(), DType::i32, {1}),
                             .block_table = make_view(block_table.data(), DType::i32, {1, num_blocks}),
                             .slot_mapping = make_view(slot_mapping.data(), DType::i64, {num_tokens}),
                             .gdn = {.query_start_loc = query_starts,
                                     .state_indices = make_view(state_indices.data(), DType::i32, {1}),
                                     .has_initial_state = make_view(has_initial_state.data(), DType::u8, {1})}};
  const PrivateCaches caches(config, num_blocks, ctx.device);
  HybridDecoder decoder(config, std::move(weights), ctx, {.max_num_tokens = static_cast<int>(num_tokens)});

  DenseForwardOutput output;
  HybridDecoder::Observer observer;
  if (with_hidden)
    observer = [&output](int, const TensorView& hidden) {
      const auto* values = hidden.as<float>();
      output.hidden.insert(output.hidden.end(), values, values + hidden.numel());
    };
  const TensorView hidden = decoder.forward(inputs, {.attention = caches.attention, .state = caches.state}, observer);
  output.logits.resize(static_cast<std::size_t>(num_tokens * config.vocab_size));
  std::vector<std::int32_t> all_rows(token_ids.size());
  std::iota(all_rows.begin(), all_rows.end(), 0);
  decoder.compute_logits(hidden, make_view(all_rows.data(), DType::i32, {num_tokens}),
                         make_view(output.logits.data(), DType::f32, {num_tokens, config.vocab_size}));
  return output;
}

}  // namespace deltaic

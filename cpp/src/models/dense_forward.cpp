#include "cpp/src/models/dense_forward.h"

#include <algorithm>
#include <numeric>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/device_values.h"

namespace deltaic {

namespace {

constexpr int kBlockSize = 16;
constexpr std::int64_t kLogitsRows = 256;  // at a time

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

  //   dtype  of keys, values and conv states; recurrent states are f32
  PrivateCaches(const ModelConfig& config, std::int64_t num_blocks, Device device, DType dtype) {
    const auto make = [&](DType type, std::initializer_list<std::int64_t> shape) {
      return memory.emplace_back(type, shape, device).view();
    };
    for (const LayerKind kind : config.layer_kinds)
      if (kind == LayerKind::full_attention) {
        const TensorView k = make(dtype, {num_blocks, kBlockSize, config.num_kv_heads, config.head_dim});
        attention.push_back({.k = k, .v = make(dtype, {num_blocks, kBlockSize, config.num_kv_heads, config.head_dim})});
      } else {
        const TensorView conv = make(dtype, {1, config.conv_dim(), config.linear_conv_kernel_dim - 1});
        state.push_back({.conv = conv,
                         .temporal = make(DType::f32, {1, config.linear_num_value_heads, config.linear_value_head_dim,
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

  const Device device = ctx.device;
  const auto ints = [&](const std::vector<std::int32_t>& values) { return on_device(values, DType::i32, device); };
  const auto longs = [&](const std::vector<std::int64_t>& values) { return on_device(values, DType::i64, device); };
  const std::int64_t num_blocks = (num_tokens + kBlockSize - 1) / kBlockSize;
  const auto length = static_cast<std::int32_t>(num_tokens);
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(num_blocks)), rows(token_ids.size());
  std::vector<std::int64_t> slots(token_ids.size());
  std::iota(blocks.begin(), blocks.end(), 0);
  std::iota(rows.begin(), rows.end(), 0);
  std::iota(slots.begin(), slots.end(), std::int64_t{0});

  const Tensor ids = ints({token_ids.begin(), token_ids.end()}), query_start_loc = ints({0, length}),
               seq_lens = ints({length}), block_table = ints(blocks), state_indices = ints({0}), all_rows = ints(rows);
  const Tensor all_positions = longs(complete_positions(positions, token_ids.size())), slot_mapping = longs(slots);
  const Tensor has_initial_state = on_device(std::vector<std::uint8_t>{0}, DType::u8, device);
  const std::int64_t num_streams = all_positions.view().numel() / num_tokens;
  const ForwardInputs inputs{.input_ids = ids.view(),
                             .positions = all_positions.view().reshape({num_streams, num_tokens}),
                             .query_start_loc = query_start_loc.view(),
                             .seq_lens = seq_lens.view(),
                             .block_table = block_table.view().reshape({1, num_blocks}),
                             .slot_mapping = slot_mapping.view(),
                             .gdn = {.query_start_loc = query_start_loc.view(),
                                     .state_indices = state_indices.view(),
                                     .has_initial_state = has_initial_state.view()},
                             .max_query_len = length,
                             .max_seq_len = length};
  const DType dtype = device.type == DeviceType::cpu ? DType::f32 : weights->placement.dtype;
  const PrivateCaches caches(config, num_blocks, device, dtype);
  HybridDecoder decoder(config, std::move(weights), ctx, {.max_num_tokens = length});

  DenseForwardOutput output;
  HybridDecoder::Observer observer;
  if (with_hidden) observer = [&output](int, const TensorView& hidden) { append_values(hidden, output.hidden); };
  const TensorView hidden = decoder.forward(inputs, {.attention = caches.attention, .state = caches.state}, observer);
  for (std::int64_t begin = 0; begin < num_tokens; begin += kLogitsRows) {
    const std::int64_t end = std::min(begin + kLogitsRows, num_tokens);
    const Tensor logits(DType::f32, {end - begin, config.vocab_size}, device);
    decoder.compute_logits(hidden, all_rows.view().slice(begin, end), logits.view());
    append_values(logits.view(), output.logits);
  }
  return output;
}

}  // namespace deltaic

#include "cpp/src/models/hybrid_decoder.h"

#include <algorithm>
#include <cstring>

#include "cpp/src/check.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic {

struct HybridDecoder::Impl {
  ModelConfig config;
  std::shared_ptr<const DecoderWeights> weights;
  ops::Context ctx;
  DecoderLimits limits;
  DType dtype;  // of activations
  ops::RotaryTable rotary;
  Tensor residual;      // [max_num_tokens, hidden_size]: the sum that every layer adds to
  Tensor normed;        // [max_num_tokens, hidden_size]: what a layer reads, and at the end the hidden states
  Workspace workspace;  // of the layer that runs

  ops::FusedNorm norm(const Tensor& weight) const {
    return {.weight = weight.view(), .eps = static_cast<float>(config.rms_norm_eps)};
  }
  void check(const ForwardInputs& inputs, const CacheViews& caches) const;
  StepShape shape_of(const ForwardInputs& inputs) const;
};

namespace {

StepShape largest_step(Device device, DType dtype, const DecoderLimits& limits) {
  return {.device = device,
          .dtype = dtype,
          .num_tokens = limits.max_num_tokens,
          .num_seqs = limits.max_num_seqs > 0 ? limits.max_num_seqs : limits.max_num_tokens,
          .num_decodes = limits.max_num_decodes,
          .max_decode_query_len = limits.max_decode_query_len,
          .max_seq_len = limits.max_model_len,
          .num_verified = limits.max_decode_query_len > 1 ? limits.max_num_decodes : 0};
}

std::size_t workspace_bytes(const DecoderWeights& weights, const StepShape& shape) {
  std::size_t most = 0;
  const auto measure = [&](const auto& layer) {
    Workspace workspace;
    layer.take_buffers(workspace, shape);
    most = std::max(most, workspace.num_taken_bytes());
  };
  for (const DecoderLayer& layer : weights.layers) {
    std::visit(measure, layer.mixer);
    std::visit(measure, layer.feed_forward);
  }
  return most;
}

}  // namespace

HybridDecoder::HybridDecoder(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights,
                             const ops::Context& ctx, const DecoderLimits& limits) {
  const std::int64_t max_num_tokens = limits.max_num_tokens;
  const WeightPlacement& placement = weights->placement;
  DELTAIC_CHECK(max_num_tokens > 0, "max_num_tokens is ", max_num_tokens, ", it must be above 0");
  DELTAIC_CHECK(placement.device == ctx.device, "the weights are not on the device that the decoder runs on");
  DELTAIC_CHECK(limits.max_num_decodes == 0 || limits.max_model_len > 0, "max_model_len is ", limits.max_model_len,
                " with max_num_decodes ", limits.max_num_decodes);
  const DType dtype = ctx.device.type == DeviceType::cpu ? DType::f32 : placement.dtype;
  const std::size_t num_bytes = workspace_bytes(*weights, largest_step(ctx.device, dtype, limits));
  impl_ = std::make_unique<Impl>(Impl{.config = config,
                                      .weights = std::move(weights),
                                      .ctx = ctx,
                                      .limits = limits,
                                      .dtype = dtype,
                                      .rotary = ops::make_rotary_table(config),
                                      .residual = Tensor(dtype, {max_num_tokens, config.hidden_size}, ctx.device),
                                      .normed = Tensor(dtype, {max_num_tokens, config.hidden_size}, ctx.device),
                                      .workspace = Workspace(num_bytes, ctx.device)});
}

HybridDecoder::~HybridDecoder() = default;
HybridDecoder::HybridDecoder(HybridDecoder&&) noexcept = default;
HybridDecoder& HybridDecoder::operator=(HybridDecoder&&) noexcept = default;

TensorView HybridDecoder::embeddings(std::int64_t num_tokens) const {
  return impl_->residual.view().slice(0, num_tokens);
}

void HybridDecoder::Impl::check(const ForwardInputs& inputs, const CacheViews& caches) const {
  DELTAIC_CHECK(inputs.input_ids.rank == 1 && inputs.input_ids.shape[0] <= limits.max_num_tokens, "a step of ",
                inputs.input_ids.shape[0], " tokens, the most is ", limits.max_num_tokens);
  const TensorView& embeds = inputs.inputs_embeds;
  if (embeds.data != nullptr) {
    if (ctx.device.type != DeviceType::cpu && embeds.data != residual.view().data)
      throw Unsupported("inputs_embeds of another buffer are for the CPU");
    DELTAIC_CHECK(embeds.dtype == dtype && embeds.rank == 2 && embeds.shape[0] == inputs.input_ids.shape[0] &&
                      embeds.shape[1] == config.hidden_size && embeds.is_contiguous(),
                  "inputs_embeds are ", name(embeds.dtype), " [", embeds.shape[0], ", ", embeds.shape[1],
                  "], wanted contiguous ", name(dtype), " [", inputs.input_ids.shape[0], ", ", config.hidden_size, "]");
  }
  const auto num_attention = static_cast<std::size_t>(config.num_layers_of(LayerKind::full_attention));
  const auto num_recurrent = static_cast<std::size_t>(config.num_layers_of(LayerKind::linear_attention));
  DELTAIC_CHECK(caches.attention.size() == num_attention && caches.state.size() == num_recurrent, "caches of ",
                caches.attention.size(), " attention and ", caches.state.size(), " recurrent layers, the model has ",
                num_attention, " and ", num_recurrent);
  DELTAIC_CHECK(ctx.device.type == DeviceType::cpu || (inputs.num_decodes <= limits.max_num_decodes &&
                                                       inputs.max_decode_query_len <= limits.max_decode_query_len),
                inputs.num_decodes, " decodes of up to ", inputs.max_decode_query_len, " tokens, the most are ",
                limits.max_num_decodes, " of ", limits.max_decode_query_len);
}

StepShape HybridDecoder::Impl::shape_of(const ForwardInputs& inputs) const {
  return {.device = ctx.device,
          .dtype = dtype,
          .num_tokens = inputs.input_ids.shape[0],
          .num_seqs = inputs.gdn.state_indices.shape[0],
          .num_decodes = inputs.num_decodes,
          .max_decode_query_len = inputs.max_decode_query_len,
          .max_seq_len = inputs.max_seq_len > 0 ? inputs.max_seq_len : limits.max_model_len,
          .num_verified = inputs.gdn.num_verified()};
}

TensorView HybridDecoder::forward(const ForwardInputs& inputs, const CacheViews& caches, const Observer& observer) {
  Impl& self = *impl_;
  self.check(inputs, caches);
  const ops::Context& ctx = self.ctx;
  const std::int64_t num_tokens = inputs.input_ids.shape[0];
  const TensorView x = self.residual.view().slice(0, num_tokens), h = self.normed.view().slice(0, num_tokens);
  if (num_tokens == 0) return h;
  const auto observe = [&](int index, const TensorView& hidden) {
    if (observer) observer(index, hidden);
  };
  const AttentionStep step{.rotary = &self.rotary,
                           .positions = inputs.positions,
                           .query_start_loc = inputs.query_start_loc,
                           .seq_lens = inputs.seq_lens,
                           .block_table = inputs.block_table,
                           .slot_mapping = inputs.slot_mapping,
                           .max_query_len = inputs.max_query_len};
  const StepShape shape = self.shape_of(inputs);

  if (inputs.inputs_embeds.data == nullptr)
    ops::embedding(ctx, inputs.input_ids, self.weights->embedding, x);
  else if (inputs.inputs_embeds.data != x.data)
    std::memcpy(x.data, inputs.inputs_embeds.data, x.num_bytes());
  observe(0, x);
  int num_layers = 0;
  auto attention_cache = caches.attention.begin();
  auto state_cache = caches.state.begin();
  for (const DecoderLayer& layer : self.weights->layers) {
    LayerInput mixer_input(x, self.norm(layer.input_norm), h);
    self.workspace.reset();
    if (const auto* attention = std::get_if<Attention>(&layer.mixer)) {
      attention->forward(ctx, mixer_input, shape, step, attention_cache->k, attention_cache->v, self.workspace, x);
      ++attention_cache;
    } else {
      std::get<GatedDeltaNet>(layer.mixer)
          .forward(ctx, mixer_input, shape, inputs.gdn, state_cache->conv, state_cache->temporal, state_cache->replay,
                   self.workspace, x);
      ++state_cache;
    }

    LayerInput feed_forward_input(x, self.norm(layer.post_attention_norm), h);
    self.workspace.reset();
    if (const auto* mlp = std::get_if<Mlp>(&layer.feed_forward))
      mlp->forward(ctx, feed_forward_input, mlp->take_buffers(self.workspace, shape), /*accumulate=*/true, x);
    else
      std::get<Moe>(layer.feed_forward).forward(ctx, feed_forward_input, shape, self.workspace, x);
    observe(++num_layers, x);
  }
  const ops::FusedNorm final_norm = self.norm(self.weights->final_norm);
  ops::rms_norm(ctx, x, final_norm.weight, final_norm.eps, h);
  observe(num_layers + 1, h);
  return h;
}

void HybridDecoder::compute_logits(const TensorView& hidden_states, const TensorView& row_indices, TensorView logits) {
  Impl& self = *impl_;
  const std::int64_t num_rows = row_indices.shape[0];
  DELTAIC_CHECK(logits.rank == 2 && logits.shape[0] == num_rows && logits.shape[1] == self.config.vocab_size,
                "logits are [", logits.shape[0], ", ", logits.shape[1], "], wanted [", num_rows, ", ",
                self.config.vocab_size, "]");
  if (self.ctx.device.type == DeviceType::cpu)
    for (std::int64_t i = 0; i < num_rows; ++i) {
      const std::int32_t row = row_indices.as<std::int32_t>()[i];
      DELTAIC_CHECK(0 <= row && row < hidden_states.shape[0], "row ", row, " of ", hidden_states.shape[0],
                    " hidden states");
    }
  // Rows are gathered where the residual stream was: it is not needed any more.
  for (std::int64_t begin = 0; begin < num_rows; begin += self.limits.max_num_tokens) {
    const std::int64_t end = std::min(begin + self.limits.max_num_tokens, num_rows);
    const TensorView rows = self.residual.view().slice(0, end - begin);
    ops::embedding(self.ctx, row_indices.slice(begin, end), {.view = hidden_states, .owner = {}}, rows);
    ops::linear(self.ctx, rows, self.weights->head, logits.slice(begin, end));
  }
}

}  // namespace deltaic

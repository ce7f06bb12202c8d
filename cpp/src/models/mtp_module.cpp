#include "cpp/src/models/mtp_module.h"

#include "cpp/src/check.h"
#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic {

namespace {

// The module as a decoder: one layer of full attention.
ModelConfig block_config(ModelConfig config) {
  config.num_layers = 1;
  config.layer_kinds = {LayerKind::full_attention};
  config.is_moe_layer = {config.num_experts > 0};
  return config;
}

}  // namespace

MtpModule::MtpModule(const ModelConfig& config, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
                     const DecoderLimits& limits)
    : eps_(static_cast<float>(config.rms_norm_eps)),
      hidden_size_(config.hidden_size),
      weights_(std::move(weights)),
      ctx_(ctx),
      decoder_(block_config(config), {weights_, &weights_->block}, ctx, limits),
      gathered_(decoder_.embeddings(0).dtype, {limits.max_num_tokens, hidden_size_}, ctx.device),
      joined_(gathered_.view().dtype, {limits.max_num_tokens, 2 * hidden_size_}, ctx.device) {}

TensorView MtpModule::forward(const ForwardInputs& inputs, const TensorView& hidden_states,
                              const TensorView& hidden_rows, const AttentionCacheViews& cache) {
  const std::int64_t num_tokens = inputs.input_ids.shape[0];
  DELTAIC_CHECK(num_tokens <= gathered_.view().shape[0], "a pass of ", num_tokens, " tokens, the most is ",
                gathered_.view().shape[0]);
  DELTAIC_CHECK(hidden_rows.shape[0] == num_tokens && hidden_states.shape[1] == hidden_size_, "a pass of ", num_tokens,
                " tokens has ", hidden_rows.shape[0], " hidden rows of ", hidden_states.shape[1],
                " elements, wanted are ", hidden_size_);
  const TensorView gathered = gathered_.view().slice(0, num_tokens), joined = joined_.view().slice(0, num_tokens);
  ops::embedding(ctx_, inputs.input_ids, weights_->block.embedding, gathered);
  ops::rms_norm(ctx_, gathered, weights_->embedding_norm.view(), eps_, columns(joined, 0, hidden_size_));
  ops::embedding(ctx_, hidden_rows, {.view = hidden_states, .owner = {}}, gathered);
  ops::rms_norm(ctx_, gathered, weights_->hidden_norm.view(), eps_, columns(joined, hidden_size_, hidden_size_));
  ForwardInputs block = inputs;
  block.inputs_embeds = decoder_.embeddings(num_tokens);
  ops::linear(ctx_, joined, weights_->fc, block.inputs_embeds);
  return decoder_.forward(block, {.attention = {&cache, 1}, .state = {}});
}

}  // namespace deltaic

#include "cpp/src/models/dense_draft.h"

#include <algorithm>
#include <numeric>

#include "cpp/src/check.h"
#include "cpp/src/models/dense_forward.h"
#include "cpp/src/models/device_values.h"
#include "cpp/src/models/mtp_module.h"

namespace deltaic {

namespace {

// One sequence through the module, with a cache of one block.
class DraftSequence {
 public:
  DraftSequence(const ModelConfig& config, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
                int max_num_tokens)
      : device_(ctx.device),
        dtype_(ctx.device.type == DeviceType::cpu ? DType::f32 : weights->block.placement.dtype),
        module_(config, std::move(weights), ctx, {.max_num_tokens = max_num_tokens}),
        k_(dtype_, {1, max_num_tokens, config.num_kv_heads, config.head_dim}, device_),
        v_(dtype_, {1, max_num_tokens, config.num_kv_heads, config.head_dim}, device_) {}

  // The next positions, with the tokens behind them. `hidden_states` has a row a token.
  TensorView run(std::span<const std::int32_t> token_ids, const TensorView& hidden_states) {
    const auto count = static_cast<std::int64_t>(token_ids.size());
    std::vector<std::int32_t> rows(token_ids.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<std::int64_t> positions(token_ids.size());
    std::iota(positions.begin(), positions.end(), std::int64_t{num_computed_});
    num_computed_ += static_cast<std::int32_t>(count);
    const auto ints = [&](const std::vector<std::int32_t>& values) { return on_device(values, DType::i32, device_); };
    const Tensor ids = ints({token_ids.begin(), token_ids.end()}), hidden_rows = ints(rows),
                 starts = ints({0, static_cast<std::int32_t>(count)}), lengths = ints({num_computed_}),
                 blocks = ints({0}), slots = on_device(positions, DType::i64, device_);
    const ForwardInputs inputs{.input_ids = ids.view(),
                               .positions = slots.view().reshape({1, count}),
                               .query_start_loc = starts.view(),
                               .seq_lens = lengths.view(),
                               .block_table = blocks.view().reshape({1, 1}),
                               .slot_mapping = slots.view(),
                               .gdn = {}};
    const TensorView hidden =
        module_.forward(inputs, hidden_states, hidden_rows.view(), {.k = k_.view(), .v = v_.view()});
    if (device_.type == DeviceType::cuda) cuda::wait_for_device(device_.index);  // what it reads goes now
    return hidden;
  }
  MtpModule& module() { return module_; }
  DType dtype() const { return dtype_; }

 private:
  Device device_;
  DType dtype_;  // of activations
  MtpModule module_;
  Tensor k_, v_;
  std::int32_t num_computed_ = 0;
};

}  // namespace

DenseDraftOutput dense_draft(const ModelConfig& config, std::shared_ptr<const DecoderWeights> weights,
                             std::shared_ptr<const MtpWeights> mtp_weights, const ops::Context& ctx,
                             std::span<const std::int32_t> token_ids, std::int32_t next_token, int num_drafts) {
  DELTAIC_CHECK(num_drafts >= 1, "num_drafts is ", num_drafts, ", at least 1 is needed");
  const auto num_tokens = static_cast<std::int64_t>(token_ids.size());
  DenseForwardOutput target = dense_forward(config, std::move(weights), ctx, token_ids, /*with_hidden=*/true, {});
  const auto final_hidden =
      std::span<const float>(target.hidden)
          .subspan(static_cast<std::size_t>((config.num_layers + 1) * num_tokens * config.hidden_size));

  DraftSequence sequence(config, std::move(mtp_weights), ctx, static_cast<int>(num_tokens) + num_drafts);
  std::vector<std::int32_t> shifted(token_ids.begin() + 1, token_ids.end());
  shifted.push_back(next_token);
  const Tensor model_hidden = rows_on_device(final_hidden, num_tokens, sequence.dtype(), ctx.device);
  const Tensor step_logits(DType::f32, {1, config.vocab_size}, ctx.device);
  TensorView hidden = sequence.run(shifted, model_hidden.view());
  DenseDraftOutput output;
  append_values(hidden, output.hidden);
  for (int i = 0; i < num_drafts; ++i) {
    if (i > 0) hidden = sequence.run({&output.token_ids.back(), 1}, hidden.slice(hidden.shape[0] - 1, hidden.shape[0]));
    const Tensor last =
        on_device<std::int32_t>({static_cast<std::int32_t>(hidden.shape[0]) - 1}, DType::i32, ctx.device);
    sequence.module().compute_logits(hidden, last.view(), step_logits.view());
    append_values(step_logits.view(), output.logits);
    const auto logits = output.logits.end() - config.vocab_size;
    output.token_ids.push_back(static_cast<std::int32_t>(std::max_element(logits, output.logits.end()) - logits));
  }
  return output;
}

}  // namespace deltaic

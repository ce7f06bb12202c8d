#include "cpp/src/models/dense_draft.h"

#include <algorithm>
#include <numeric>

#include "cpp/src/check.h"
#include "cpp/src/models/dense_forward.h"
#include "cpp/src/models/mtp_module.h"

namespace deltaic {

namespace {

TensorView view_of(std::vector<std::int32_t>& values) {
  return make_view(values.data(), DType::i32, {static_cast<std::int64_t>(values.size())});
}

// One sequence through the module, with a cache of one block.
class DraftSequence {
 public:
  DraftSequence(const ModelConfig& config, std::shared_ptr<const MtpWeights> weights, const ops::Context& ctx,
                int max_num_tokens)
      : module_(config, std::move(weights), ctx, {.max_num_tokens = max_num_tokens}),
        k_(DType::f32, {1, max_num_tokens, config.num_kv_heads, config.head_dim}),
        v_(DType::f32, {1, max_num_tokens, config.num_kv_heads, config.head_dim}) {}

  // The next positions, with the tokens behind them. `hidden_states` has a row a token.
  TensorView run(std::span<const std::int32_t> token_ids, const TensorView& hidden_states) {
    const auto count = static_cast<std::int64_t>(token_ids.size());
    std::vector<std::int32_t> ids(token_ids.begin(), token_ids.end()), rows(ids.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<std::int64_t> positions(ids.size());
    std::iota(positions.begin(), positions.end(), std::int64_t{num_computed_});
    num_computed_ += static_cast<std::int32_t>(count);
    std::vector<std::int32_t> starts{0, static_cast<std::int32_t>(count)}, lengths{num_computed_}, blocks{0};
    const ForwardInputs inputs{.input_ids = view_of(ids),
                               .positions = make_view(positions.data(), DType::i64, {1, count}),
                               .query_start_loc = view_of(starts),
                               .seq_lens = view_of(lengths),
                               .block_table = make_view(blocks.data(), DType::i32, {1, 1}),
                               .slot_mapping = make_view(positions.data(), DType::i64, {count}),
                               .gdn = {}};
    return module_.forward(inputs, hidden_states, view_of(rows), {.k = k_.view(), .v = v_.view()});
  }
  MtpModule& module() { return module_; }

 private:
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
  float* const final_hidden = target.hidden.data() + (config.num_layers + 1) * num_tokens * config.hidden_size;

  DraftSequence sequence(config, std::move(mtp_weights), ctx, static_cast<int>(num_tokens) + num_drafts);
  std::vector<std::int32_t> shifted(token_ids.begin() + 1, token_ids.end());
  shifted.push_back(next_token);
  TensorView hidden = sequence.run(shifted, make_view(final_hidden, DType::f32, {num_tokens, config.hidden_size}));
  DenseDraftOutput output;
  output.hidden.assign(hidden.as<float>(), hidden.as<float>() + hidden.numel());
  output.logits.resize(static_cast<std::size_t>(num_drafts) * static_cast<std::size_t>(config.vocab_size));
  for (int i = 0; i < num_drafts; ++i) {
    if (i > 0) hidden = sequence.run({&output.token_ids.back(), 1}, hidden.slice(hidden.shape[0] - 1, hidden.shape[0]));
    std::vector<std::int32_t> last{static_cast<std::int32_t>(hidden.shape[0]) - 1};
    float* const logits = output.logits.data() + std::int64_t{i} * config.vocab_size;
    sequence.module().compute_logits(hidden, view_of(last), make_view(logits, DType::f32, {1, config.vocab_size}));
    output.token_ids.push_back(
        static_cast<std::int32_t>(std::max_element(logits, logits + config.vocab_size) - logits));
  }
  return output;
}

}  // namespace deltaic

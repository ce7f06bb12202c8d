#include "cpp/src/runner/cuda_drafts.h"

#include <algorithm>
#include <numeric>

#include "cpp/src/models/device_values.h"

namespace deltaic {

namespace {

Tensor counted(std::int64_t count, Device device) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return on_device(values, DType::i32, device);
}

}  // namespace

CudaDrafts::CudaDrafts(const ExecutorParts& parts, const StepUploader& uploader)
    : parts_(parts),
      uploader_(uploader),
      max_drafts_(parts.options.num_speculative_tokens),
      max_num_reqs_(parts.options.max_num_reqs) {
  const Device device = parts.ctx.device;
  const std::int64_t num_reqs = max_num_reqs_, num_tokens = padded_decoder_limits(parts.options).max_num_tokens;
  num_accepted_ = Tensor(DType::i32, {num_reqs}, device);
  num_rejected_ = Tensor(DType::i32, {num_reqs}, device);
  context_ids_ = Tensor(DType::i32, {num_reqs * (1 + max_drafts_), max_drafts_}, device);
  result_ = Tensor(DType::i32, {VerifiedWords::count(max_num_reqs_, max_drafts_)}, device);
  shifted_ids_ = Tensor(DType::i32, {num_tokens}, device);
  counted_ = counted(num_tokens + 1, device);
  pass_ints_ = Tensor(DType::i32, {6 + max_drafts_, num_reqs}, device);
  pass_longs_ = Tensor(DType::i64, {3, num_reqs}, device);
  if (parts.mtp_weights != nullptr)
    module_.emplace(parts.model, parts.mtp_weights, parts.ctx, padded_decoder_limits(parts.options));
}

cuda::DraftRows CudaDrafts::rows() const {
  const StepArrays& arrays = uploader_.arrays();
  const ForwardInputs inputs = uploader_.inputs();
  return {.num_rows = uploader_.sizes().num_rows,
          .num_verified = inputs.num_decodes,
          .slots = arrays.row_slots,
          .query_start_loc = arrays.query_start_loc,
          .first_samples = arrays.first_samples,
          .capacities = arrays.capacities,
          .block_table = inputs.block_table.as<std::int32_t>(),
          .row_stride = inputs.block_table.stride[0],
          .block_size = parts_.groups.block_size(),
          .max_model_len = parts_.options.max_model_len};
}

cuda::DraftSlots CudaDrafts::kept() const {
  return {.tokens = uploader_.kept_tokens().as<std::int32_t>(),
          .num_accepted = num_accepted_.as<std::int32_t>(),
          .num_rejected = num_rejected_.as<std::int32_t>(),
          .num_slots = max_num_reqs_,
          .max_drafts = max_drafts_};
}

cuda::VerifiedRows CudaDrafts::result() const {
  const VerifiedWords words(result_.as<std::int32_t>(), uploader_.sizes().num_rows, max_drafts_);
  return {.token_ids = words.token_ids, .counts = words.counts, .is_finite = words.is_finite, .drafts = words.drafts};
}

cuda::DraftPass CudaDrafts::pass() const {
  const auto ints = [&](int row) { return pass_ints_.as<std::int32_t>() + std::int64_t{row} * max_num_reqs_; };
  const auto longs = [&](int row) { return pass_longs_.as<std::int64_t>() + std::int64_t{row} * max_num_reqs_; };
  return {.slots = ints(0),
          .input_ids = ints(1),
          .hidden_rows = ints(2),
          .begin_positions = longs(0),
          .positions = longs(1),
          .slot_mapping = longs(2),
          .seq_lens = ints(3),
          .output_positions = ints(4),
          .num_context = ints(5),
          .context_ids = ints(6)};
}

void CudaDrafts::place() {
  const StepArrays& arrays = uploader_.arrays();
  cuda::place_tokens(parts_.ctx.stream, {.kept = kept(),
                                         .rows = rows(),
                                         .num_rejected = arrays.num_rejected,
                                         .token_ids = uploader_.token_ids().as<std::int32_t>(),
                                         .positions = arrays.positions,
                                         .slot_mapping = arrays.slot_mapping,
                                         .seq_lens = arrays.seq_lens,
                                         .num_accepted = arrays.num_accepted,
                                         .snapshot_offsets = arrays.snapshot_offsets,
                                         .output_positions = arrays.output_positions,
                                         .context_ids = context_ids_.as<std::int32_t>()});
}

void CudaDrafts::verify_and_draft(const Sampled& sampled, int num_drafts, ops::DeviceSampler& sampler) {
  const StepArrays& arrays = uploader_.arrays();
  const std::int64_t num_rows = uploader_.sizes().num_rows;
  const cuda::VerifiedRows verified = result();
  cuda::verify_tokens(parts_.ctx.stream, {.kept = kept(),
                                          .rows = rows(),
                                          .sampled_ids = sampled.token_ids.as<std::int32_t>(),
                                          .is_finite = sampled.is_finite.as<std::uint8_t>(),
                                          .token_ids = uploader_.token_ids().as<std::int32_t>(),
                                          .positions = arrays.positions,
                                          .output_positions = arrays.output_positions,
                                          .next_ids = arrays.next_ids,
                                          .acceptance = parts_.options.scripted_draft_acceptance,
                                          .makes_drafts = module_.has_value() && num_drafts > 0,
                                          .result = verified,
                                          .shifted_ids = shifted_ids_.as<std::int32_t>(),
                                          .pass = pass()});
  const auto view = [&](std::int32_t* data, std::initializer_list<std::int64_t> shape) {
    return make_view(data, DType::i32, shape, parts_.ctx.device);
  };
  if (!sampled.all_greedy)
    sampler.add_tokens({.slots = view(arrays.row_slots, {num_rows}),
                        .output_positions = view(pass().output_positions, {num_rows}),
                        .token_ids = view(verified.token_ids, {num_rows, 1 + max_drafts_}),
                        .counts = view(verified.counts, {num_rows})});
  make_drafts(sampled, num_drafts, sampler);
}

// The first pass runs over the tokens of the step, rejected ones included: what it stores for these is stored anew
// before it is read, as the model's own keys and values are. Each further pass has one token a row.
void CudaDrafts::make_drafts(const Sampled& sampled, int num_drafts, ops::DeviceSampler& sampler) {
  if (!module_) return;
  MtpModule& module = *module_;
  const std::int64_t num_rows = uploader_.sizes().num_rows, num_tokens = uploader_.sizes().num_tokens;
  const Device device = parts_.ctx.device;
  const auto ints = [&](std::int32_t* data) { return make_view(data, DType::i32, {num_rows}, device); };
  const auto longs = [&](std::int64_t* data) { return make_view(data, DType::i64, {num_rows}, device); };
  const TensorView row_numbers = counted_.view().slice(0, num_rows);
  const cuda::DraftPass next = pass();

  ForwardInputs inputs = sampled.inputs;
  inputs.input_ids = shifted_ids_.view().slice(0, num_tokens);
  inputs.gdn = {};
  TensorView hidden =
      module.forward(inputs, sampled.hidden_states, counted_.view().slice(0, num_tokens), parts_.caches.draft());
  for (int i = 0; i < num_drafts; ++i) {
    if (i > 0)
      hidden = module.forward(inputs, hidden, i == 1 ? ints(next.hidden_rows) : row_numbers, parts_.caches.draft());
    const TensorView logits = sampled.logits.slice(0, num_rows);
    module.compute_logits(hidden, i == 0 ? ints(next.hidden_rows) : row_numbers, logits);
    const ops::DeviceSampler::Args args{
        .logits = logits,
        .slots = ints(next.slots),
        .output_positions = ints(next.output_positions),
        .context_ids = make_view(next.context_ids, DType::i32, {num_rows, max_drafts_}, device),
        .num_context = ints(next.num_context),
        .all_greedy = sampled.all_greedy,
        .token_ids = sampled.token_ids.slice(0, num_rows),
        .is_finite = sampled.is_finite.slice(0, num_rows)};
    sampler.sample(args);
    cuda::take_draft(parts_.ctx.stream, {.kept = kept(),
                                         .rows = rows(),
                                         .sampled_ids = args.token_ids.as<std::int32_t>(),
                                         .is_finite = args.is_finite.as<std::uint8_t>(),
                                         .number = i,
                                         .is_last = i + 1 == num_drafts,
                                         .result = result(),
                                         .pass = next});
    if (i > 0) continue;
    inputs = {.input_ids = ints(next.input_ids),
              .positions = longs(next.positions).reshape({1, num_rows}),
              .query_start_loc = counted_.view().slice(0, num_rows + 1),
              .seq_lens = ints(next.seq_lens),
              .block_table = sampled.inputs.block_table,
              .slot_mapping = longs(next.slot_mapping),
              .gdn = {},
              .num_decodes = static_cast<int>(num_rows),
              .max_decode_query_len = 1,
              .max_query_len = 0,
              .max_seq_len = std::min(sampled.inputs.max_seq_len + num_drafts, parts_.options.max_model_len)};
  }
}

void CudaDrafts::fetch(StepResult& result) const {
  result.num_rows = uploader_.sizes().num_rows;
  cuda::copy_words(parts_.ctx.stream, result_.as<std::int32_t>(), result.verified,
                   VerifiedWords::count(result.num_rows, max_drafts_));
}

}  // namespace deltaic

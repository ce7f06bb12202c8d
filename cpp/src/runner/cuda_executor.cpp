#include "cpp/src/runner/cuda_executor.h"

#include <algorithm>

#include <deltaic/error.h>

#include "cpp/src/core/transfer.h"
#include "cpp/src/ops/batch_memcpy.h"
#include "cpp/src/ops/sampler.h"
#include "cpp/src/runner/step_kernels.h"

namespace deltaic {

namespace {

// Prompt positions whose logits go to the host at once.
constexpr int kPromptRows = 64;
constexpr int kMaxColumns = ops::DeviceSampler::kMaxLogprobs;

DecoderLimits limits_of(const RunnerOptions& options) {
  DecoderLimits limits = decoder_limits(options);
  limits.max_num_tokens = std::max(limits.max_num_tokens, options.max_num_reqs);  // a padded step of decodes
  return limits;
}

}  // namespace

CudaExecutor::CudaExecutor(const ExecutorParts& parts)
    : parts_(parts),
      decoder_(parts.model, parts.weights, parts.ctx, limits_of(parts.options)),
      copier_(parts.caches.state()),
      uploader_({.max_num_reqs = parts.options.max_num_reqs,
                 .max_num_tokens = limits_of(parts.options).max_num_tokens,
                 .block_table_row_stride =
                     parts.groups.block_table_row_strides[static_cast<std::size_t>(parts.groups.full_attn_group)]},
                copier_, parts.ctx.device),
      sampler_(parts.model.vocab_size, parts.options.max_num_reqs, parts.options.max_num_reqs, parts.ctx),
      results_(std::make_shared<StepResults>(parts.planner, parts.model.vocab_size, parts.options.max_num_reqs,
                                             kMaxColumns)),
      logits_(DType::f32, {parts.options.max_num_reqs, parts.model.vocab_size}, parts.ctx.device),
      token_ids_(DType::i32, {parts.options.max_num_reqs}, parts.ctx.device),
      is_finite_(DType::u8, {parts.options.max_num_reqs}, parts.ctx.device),
      ranks_(DType::i32, {parts.options.max_num_reqs}, parts.ctx.device),
      logprob_token_ids_(DType::i32, {parts.options.max_num_reqs * (1 + kMaxColumns)}, parts.ctx.device),
      logprobs_(DType::f32, {parts.options.max_num_reqs * (1 + kMaxColumns)}, parts.ctx.device),
      prompt_rows_(DType::i32, {kPromptRows}, parts.ctx.device) {
  warm_up();
}

CudaExecutor::~CudaExecutor() {
  results_->detach();
  try {
    parts_.stream->wait();  // kernels in flight use what goes now
  } catch (const Error&) {  // whoever waits for a step hears of it
  }
}

void CudaExecutor::warm_up() {
  constexpr int kPrefillTokens = 32;  // enough for the kernels of long prompts
  StepPlan nothing;
  nothing.inputs.query_start_loc = {0};
  InputBatch& batch = parts_.planner.batch();
  uploader_.upload(*parts_.stream, nothing, batch, parts_.groups.full_attn_group,
                   std::min(kPrefillTokens, parts_.options.max_num_reqs));
  ForwardInputs prefill = uploader_.inputs();
  prefill.num_decodes = prefill.gdn.num_decodes = 0;
  decoder_.forward(prefill, parts_.caches.views());

  std::vector<std::shared_ptr<StepResult>> results;  // as many as there may be in flight have their memory then
  for (int i = 0; i < 3; ++i) results.push_back(results_->open());
  is_graph_step_ = !parts_.options.enforce_eager;
  const int max_num_rows = is_graph_step_ ? parts_.options.max_num_reqs : 1;
  for (int rows = max_num_rows; rows > 0; --rows) {
    if (padded_num_rows(rows, max_num_rows) != rows) continue;
    run_forward(nothing, rows);
    for (const bool all_greedy : {true, false}) enqueue_samples({.all_greedy = all_greedy}, *results.front());
  }
  parts_.stream->wait();
}

void CudaExecutor::forward(const StepPlan& plan) {
  is_graph_step_ = plan.num_decodes == plan.num_rows && !parts_.options.enforce_eager;
  run_forward(plan, is_graph_step_ ? padded_num_rows(plan.num_rows, parts_.options.max_num_reqs) : plan.num_rows);
}

void CudaExecutor::run_forward(const StepPlan& plan, int num_rows) {
  uploader_.upload(*parts_.stream, plan, parts_.planner.batch(), parts_.groups.full_attn_group, num_rows);
  copy_states(uploader_.copies_before());
  ForwardInputs inputs = uploader_.inputs();
  if (is_graph_step_) {
    inputs.max_seq_len = parts_.options.max_model_len;
    graphs_.run(*parts_.stream, {.part = StepGraphs::Part::forward, .num_rows = num_rows},
                [&] { graph_hidden_states_[num_rows] = decoder_.forward(inputs, parts_.caches.views()); });
    hidden_states_ = graph_hidden_states_[num_rows];
  } else {
    hidden_states_ = decoder_.forward(inputs, parts_.caches.views());
  }
  copy_states(uploader_.copies_after());
}

void CudaExecutor::copy_states(const std::array<TensorView, 3>& copies) {
  ops::batch_memcpy(parts_.ctx, copies[0], copies[1], copies[2]);
}

AsyncModelRunnerOutput CudaExecutor::sample(const StepPlan& plan) {
  InputBatch& batch = parts_.planner.batch();
  const std::shared_ptr<StepResult> result = results_->open();
  ModelRunnerOutput& output = result->output;
  output.sampled_token_ids.resize(static_cast<std::size_t>(plan.num_rows));
  output.req_ids.reserve(static_cast<std::size_t>(plan.num_rows));
  for (int i = 0; i < plan.num_rows; ++i) {
    const BatchRow& row = batch.row(i);
    output.req_ids.push_back(row.req_id);
    output.req_id_to_index.emplace(row.req_id, i);
    if (row.sampling_params.prompt_logprobs &&
        !add_prompt_logprobs(plan.inputs.query_start_loc[static_cast<std::size_t>(i)], row, output))
      output.failed_req_ids.push_back(row.req_id);
  }
  const Wishes wishes = add_samples(*result);
  if (!result->samples.empty()) enqueue_samples(wishes, *result);
  result->is_done.record(*parts_.stream);
  for (const StepResult::Sample& sample : result->samples) batch.append_sampled_token(sample.row, result->placeholder);
  return AsyncModelRunnerOutput([results = results_, result] {
    results->read(*result);
    return std::move(result->output);
  });
}

CudaExecutor::Wishes CudaExecutor::add_samples(StepResult& result) {
  InputBatch& batch = parts_.planner.batch();
  const auto& failed = result.output.failed_req_ids;
  Wishes wishes;
  for (const int i : uploader_.sampled_rows()) {
    BatchRow& row = batch.row(i);
    if (!row.is_in_sampler) register_request(row);
    const SamplingParams& params = row.sampling_params;
    StepResult::Sample sample{.row = i, .position = row.num_tokens()};
    sample.is_wanted = std::find(failed.begin(), failed.end(), row.req_id) == failed.end();
    if (params.logprobs) {
      if (ops::DeviceSampler::gives_logprobs(params)) {
        sample.num_logprobs = *params.logprobs;
        wishes.num_logprobs = std::max(wishes.num_logprobs, *params.logprobs);
      } else {
        sample.num_host_logprobs = *params.logprobs;
        result.logits_samples.push_back(static_cast<int>(result.samples.size()));
      }
    }
    wishes.all_greedy =
        wishes.all_greedy && !params.logprobs &&
        ops::DeviceSampler::needs_only_argmax(params, static_cast<std::size_t>(row.num_output_tokens()));
    result.samples.push_back(sample);
  }
  return wishes;
}

void CudaExecutor::register_request(BatchRow& row) {
  const auto in_flight = [](std::int32_t token) { return token < 0; };
  if (std::any_of(row.token_ids.begin() + row.num_prompt_tokens, row.token_ids.end(), in_flight)) results_->read_all();
  sampler_.set_request(row.slot, row.sampling_params, row.prompt_token_ids(), row.output_token_ids(), row.seed);
  row.is_in_sampler = true;
}

bool CudaExecutor::add_prompt_logprobs(int first_hidden_row, const BatchRow& row, ModelRunnerOutput& output) {
  // The logits of a position are about the token behind it, so the last prompt position has no entry.
  const int end = std::min(row.seq_len(), row.num_prompt_tokens - 1);
  const int max_rows = std::min(kPromptRows, parts_.options.max_num_reqs);
  const std::size_t row_bytes = static_cast<std::size_t>(parts_.model.vocab_size) * sizeof(float);
  const std::size_t index_bytes = kPromptRows * sizeof(std::int32_t);
  const ops::Context host{.device = {}, .stream = {}, .threads = parts_.ctx.threads};
  for (int begin = row.num_computed_tokens; begin < end; begin += max_rows) {
    const int count = std::min(max_rows, end - begin);
    if (prompt_staging_.num_bytes() == 0)
      prompt_staging_ = cuda::PinnedBuffer(index_bytes + static_cast<std::size_t>(max_rows) * row_bytes);
    auto* indices = reinterpret_cast<std::int32_t*>(prompt_staging_.data());
    std::byte* host_logits = prompt_staging_.data() + index_bytes;
    for (int i = 0; i < count; ++i) indices[i] = first_hidden_row + begin - row.num_computed_tokens + i;
    cuda::copy_async(*parts_.stream, prompt_rows_.view().data, indices, index_bytes);
    const TensorView chunk = logits_.view().slice(0, count);
    decoder_.compute_logits(hidden_states_, prompt_rows_.view().slice(0, count), chunk);
    cuda::copy_async(*parts_.stream, host_logits, chunk.data, chunk.num_bytes());
    parts_.stream->wait();
    const std::span<const std::int32_t> tokens(row.token_ids.data() + begin + 1, static_cast<std::size_t>(count));
    const TensorView values = make_view(host_logits, DType::f32, {count, parts_.model.vocab_size});
    for (auto& entry : ops::token_logprobs(host, values, tokens, *row.sampling_params.prompt_logprobs)) {
      if (!entry) return false;
      output.prompt_logprobs[row.req_id].push_back(*std::move(entry));
    }
  }
  return true;
}

void CudaExecutor::enqueue_samples(const Wishes& wishes, StepResult& result) {
  const std::int64_t num_rows = uploader_.num_samples();
  const TensorView logits = logits_.view().slice(0, num_rows);
  ops::DeviceSampler::Args args{.logits = logits,
                                .slots = uploader_.sample_slots(),
                                .output_positions = uploader_.output_positions(),
                                .all_greedy = wishes.all_greedy,
                                .num_logprobs = wishes.num_logprobs,
                                .token_ids = token_ids_.view().slice(0, num_rows),
                                .is_finite = is_finite_.view().slice(0, num_rows)};
  if (wishes.num_logprobs >= 0) {
    const std::int64_t columns = 1 + wishes.num_logprobs;
    args.logprob_token_ids = logprob_token_ids_.view().slice(0, num_rows * columns).reshape({num_rows, columns});
    args.logprobs = logprobs_.view().slice(0, num_rows * columns).reshape({num_rows, columns});
    args.ranks = ranks_.view().slice(0, num_rows);
  }
  const auto compute_logits = [&] { decoder_.compute_logits(hidden_states_, uploader_.logits_indices(), logits); };
  if (is_graph_step_ && wishes.num_logprobs < 0 && result.logits_samples.empty()) {
    const auto part = wishes.all_greedy ? StepGraphs::Part::argmax : StepGraphs::Part::sample;
    graphs_.run(*parts_.stream, {.part = part, .num_rows = static_cast<int>(num_rows)}, [&] {
      compute_logits();
      sampler_.sample(args);
    });
  } else {
    compute_logits();
    fetch_logits(result);
    sampler_.sample(args);
  }
  fetch_tokens(args, result);
}

// Raw, before the sampler changes them.
void CudaExecutor::fetch_logits(StepResult& result) {
  const std::size_t row_bytes = static_cast<std::size_t>(parts_.model.vocab_size) * sizeof(float);
  const std::size_t num_bytes = result.logits_samples.size() * row_bytes;
  if (result.logits.num_bytes() < num_bytes) result.logits = cuda::PinnedBuffer(num_bytes);
  std::byte* row = result.logits.data();
  for (const int sample : result.logits_samples) {
    cuda::copy_async(*parts_.stream, row, logits_.view().slice(sample, sample + 1).data, row_bytes);
    row += row_bytes;
  }
}

void CudaExecutor::fetch_tokens(const ops::DeviceSampler::Args& args, StepResult& result) {
  const auto num_samples = result.samples.size();
  if (num_samples == 0) return;
  cuda::commit_tokens(parts_.ctx.stream, {.token_ids = args.token_ids.as<std::int32_t>(),
                                          .is_finite = args.is_finite.as<std::uint8_t>(),
                                          .slots = args.slots.as<std::int32_t>(),
                                          .num_rows = static_cast<std::int32_t>(num_samples),
                                          .last_sampled = uploader_.last_sampled().as<std::int32_t>(),
                                          .host_token_ids = result.token_ids,
                                          .host_is_finite = result.is_finite});
  if (args.num_logprobs < 0) return;
  result.columns = args.num_logprobs;
  const std::size_t entries = num_samples * (1 + static_cast<std::size_t>(args.num_logprobs));
  cuda::copy_async(*parts_.stream, result.logprob_token_ids, args.logprob_token_ids.data, entries * 4);
  cuda::copy_async(*parts_.stream, result.logprobs, args.logprobs.data, entries * 4);
  cuda::copy_async(*parts_.stream, result.ranks, args.ranks.data, num_samples * 4);
}

void CudaExecutor::settle(StepPlan& plan) {
  parts_.stream->wait();
  results_->read_all();
  auto& ids = plan.inputs.input_token_ids;
  if (std::none_of(ids.begin(), ids.end(), [](std::int32_t id) { return id < 0; })) return;
  cuda::copy_and_wait(ids.data(), uploader_.inputs().input_ids.data, ids.size() * sizeof(std::int32_t));
}

}  // namespace deltaic

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
// Rows that steps with drafts have graphs for: longer ones take longer than it takes to launch them.
constexpr int kMaxDraftGraphRows = 64;
constexpr int kMaxColumns = ops::DeviceSampler::kMaxLogprobs;

bool has_graph(int num_rows, int query_len) { return query_len == 1 || num_rows <= kMaxDraftGraphRows; }

// Tokens of a row that graphs are made for: the most, and none but the newest; all between where they are few, as
// "auto" may choose any number of drafts.
std::vector<int> query_lens_of(const RunnerOptions& options) {
  constexpr int kMaxAll = 2;
  if (options.enforce_eager) return {};
  if (options.num_speculative_tokens > kMaxAll) return {1, 1 + options.num_speculative_tokens};
  std::vector<int> query_lens;
  for (int drafts = 0; drafts <= options.num_speculative_tokens; ++drafts) query_lens.push_back(1 + drafts);
  return query_lens;
}

}  // namespace

CudaExecutor::CudaExecutor(const ExecutorParts& parts)
    : parts_(parts),
      decoder_(parts.model, parts.weights, parts.ctx, padded_decoder_limits(parts.options)),
      copier_(parts.caches.state()),
      uploader_({.max_num_reqs = parts.options.max_num_reqs,
                 .max_num_tokens = padded_decoder_limits(parts.options).max_num_tokens,
                 .block_table_row_stride =
                     parts.groups.block_table_row_strides[static_cast<std::size_t>(parts.groups.full_attn_group)],
                 .block_size = parts.groups.block_size(),
                 .num_speculative_tokens = parts.options.num_speculative_tokens,
                 .takes_own_drafts = parts.options.async_input_combine},
                copier_, parts.ctx.device),
      graph_query_lens_(query_lens_of(parts.options)),
      sampler_(parts.model.vocab_size, parts.options.max_num_reqs,
               parts.options.max_num_reqs * (1 + parts.options.num_speculative_tokens), parts.ctx,
               parts.options.num_speculative_tokens),
      results_(std::make_shared<StepResults>(parts.planner, parts.model.vocab_size, parts.options.max_num_reqs,
                                             parts.options.num_speculative_tokens, kMaxColumns)),
      max_num_samples_(parts.options.max_num_reqs * (1 + parts.options.num_speculative_tokens)),
      logits_(DType::f32, {max_num_samples_, parts.model.vocab_size}, parts.ctx.device),
      token_ids_(DType::i32, {max_num_samples_}, parts.ctx.device),
      is_finite_(DType::u8, {max_num_samples_}, parts.ctx.device),
      ranks_(DType::i32, {max_num_samples_}, parts.ctx.device),
      logprob_token_ids_(DType::i32, {max_num_samples_ * (1 + kMaxColumns)}, parts.ctx.device),
      logprobs_(DType::f32, {max_num_samples_ * (1 + kMaxColumns)}, parts.ctx.device),
      prompt_rows_(DType::i32, {kPromptRows}, parts.ctx.device) {
  if (parts.options.num_speculative_tokens > 0) drafts_.emplace(parts_, uploader_);
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
                   {.num_rows = std::min(kPrefillTokens, parts_.options.max_num_reqs)});
  ForwardInputs prefill = uploader_.inputs();
  prefill.num_decodes = prefill.gdn.num_decodes = 0;
  prefill.gdn.num_accepted = prefill.gdn.snapshot_slots = prefill.gdn.snapshot_offsets = {};
  decoder_.forward(prefill, parts_.caches.views());

  std::vector<std::shared_ptr<StepResult>> results;  // as many as there may be in flight have their memory then
  for (int i = 0; i < 3; ++i) results.push_back(results_->open());
  const auto run = [&](StepUploader::Frame frame, int num_drafts) {
    run_forward(nothing, frame);
    for (const bool all_greedy : {true, false})
      enqueue_samples({.all_greedy = all_greedy, .num_drafts = num_drafts}, *results.front());
  };
  if (graph_query_lens_.empty()) run({.num_rows = 1}, parts_.options.num_speculative_tokens);
  is_warming_up_ = true;
  for (int rows = parts_.options.max_num_reqs; rows > 0; --rows)
    if (padded_num_rows(rows, parts_.options.max_num_reqs) == rows)
      for (const int query_len : graph_query_lens_)
        if (has_graph(rows, query_len)) run({.num_rows = rows, .query_len = query_len}, query_len - 1);
  is_warming_up_ = false;
  parts_.stream->wait();
}

StepUploader::Frame CudaExecutor::frame_of(const StepPlan& plan) const {
  if (plan.num_decodes != plan.num_rows || graph_query_lens_.empty()) return {.num_rows = plan.num_rows};
  int longest = 1;
  for (int i = 0; i < plan.num_rows; ++i)
    longest = std::max(longest, parts_.planner.batch().row(i).num_scheduled_tokens);
  const int num_rows = padded_num_rows(plan.num_rows, parts_.options.max_num_reqs);
  const int query_len = *std::lower_bound(graph_query_lens_.begin(), graph_query_lens_.end(), longest);
  if (!has_graph(num_rows, query_len)) return {.num_rows = plan.num_rows};
  return {.num_rows = num_rows, .query_len = query_len};
}

void CudaExecutor::run_graph(StepGraphs::Part part, int num_drafts, const std::function<void()>& enqueue) {
  const StepGraphs::Key key{
      .part = part, .num_rows = frame_.num_rows, .query_len = frame_.query_len, .num_drafts = num_drafts};
  if (is_warming_up_)
    graphs_.record(*parts_.stream, key, enqueue);
  else
    graphs_.run(*parts_.stream, key, enqueue);
}

void CudaExecutor::forward(const StepPlan& plan) { run_forward(plan, frame_of(plan)); }

void CudaExecutor::run_forward(const StepPlan& plan, StepUploader::Frame frame) {
  frame_ = frame;
  uploader_.upload(*parts_.stream, plan, parts_.planner.batch(), parts_.groups.full_attn_group, frame);
  copy_states(uploader_.copies_before());
  inputs_ = uploader_.inputs();
  const bool is_graph_step = frame.query_len > 0;
  if (is_graph_step) inputs_.max_seq_len = parts_.options.max_model_len;
  const auto run = [&] {
    if (drafts_) drafts_->place();
    hidden_states_ = decoder_.forward(inputs_, parts_.caches.views());
  };
  if (is_graph_step) {
    TensorView& hidden_states = graph_hidden_states_[{frame.num_rows, frame.query_len}];
    run_graph(StepGraphs::Part::forward, 0, [&] { run(), hidden_states = hidden_states_; });
    hidden_states_ = hidden_states;
  } else {
    run();
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
  Wishes wishes = add_samples(*result);
  wishes.num_drafts = result->samples.empty() ? 0 : plan.num_drafts;
  result->makes_drafts = parts_.mtp_weights != nullptr;
  if (!result->samples.empty() || drafts_) enqueue_samples(wishes, *result);
  result->is_done.record(*parts_.stream);
  for (const StepResult::Sample& sample : result->samples) {
    for (int j = 0; j <= sample.num_drafts; ++j) batch.append_sampled_token(sample.row, result->placeholder);
    batch.row(sample.row).was_sampled = true;
  }
  return AsyncModelRunnerOutput([results = results_, result] {
    results->read(*result);
    return std::move(result->output);
  });
}

CudaExecutor::Wishes CudaExecutor::add_samples(StepResult& result) {
  InputBatch& batch = parts_.planner.batch();
  const auto& failed = result.output.failed_req_ids;
  Wishes wishes;
  int num_samples = 0;
  for (const int i : uploader_.sampled_rows()) {
    BatchRow& row = batch.row(i);
    if (!row.is_in_sampler) register_request(row);
    const SamplingParams& params = row.sampling_params;
    StepResult::Sample sample{.row = i, .first = num_samples, .num_drafts = row.num_draft_tokens};
    num_samples += 1 + row.num_draft_tokens;
    sample.is_wanted = std::find(failed.begin(), failed.end(), row.req_id) == failed.end();
    if (params.logprobs) {
      if (ops::DeviceSampler::gives_logprobs(params)) {
        sample.num_logprobs = *params.logprobs;
        wishes.num_logprobs = std::max(wishes.num_logprobs, *params.logprobs);
      } else {
        sample.num_host_logprobs = *params.logprobs;
        for (int index = sample.first; index < num_samples; ++index) result.logits_samples.push_back(index);
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
    for (auto& entry : ops::token_logprobs(host, values, tokens, row.sampling_params.prompt_logprobs.value_or(0))) {
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
  if (drafts_) args.context_ids = drafts_->context_ids(), args.num_context = uploader_.num_context();
  if (wishes.num_logprobs >= 0) {
    const std::int64_t columns = 1 + wishes.num_logprobs;
    args.logprob_token_ids = logprob_token_ids_.view().slice(0, num_rows * columns).reshape({num_rows, columns});
    args.logprobs = logprobs_.view().slice(0, num_rows * columns).reshape({num_rows, columns});
    args.ranks = ranks_.view().slice(0, num_rows);
  }
  const auto run = [&] {
    decoder_.compute_logits(hidden_states_, uploader_.logits_indices(), logits);
    fetch_logits(result);
    sampler_.sample(args);
    if (!drafts_) return;
    drafts_->verify_and_draft({.hidden_states = hidden_states_,
                               .inputs = inputs_,
                               .logits = logits_.view(),
                               .token_ids = token_ids_.view(),
                               .is_finite = is_finite_.view(),
                               .all_greedy = wishes.all_greedy},
                              wishes.num_drafts, sampler_);
  };
  const auto part = wishes.all_greedy ? StepGraphs::Part::argmax : StepGraphs::Part::sample;
  if (frame_.query_len > 0 && wishes.num_logprobs < 0 && result.logits_samples.empty())
    run_graph(part, wishes.num_drafts, run);
  else
    run();
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
  if (drafts_)
    drafts_->fetch(result);
  else
    cuda::commit_tokens(parts_.ctx.stream, {.token_ids = args.token_ids.as<std::int32_t>(),
                                            .is_finite = args.is_finite.as<std::uint8_t>(),
                                            .slots = args.slots.as<std::int32_t>(),
                                            .num_rows = static_cast<std::int32_t>(num_samples),
                                            .last_sampled = uploader_.kept_tokens().as<std::int32_t>(),
                                            .host_token_ids = result.token_ids,
                                            .host_is_finite = result.is_finite});
  if (args.num_logprobs < 0) return;
  result.columns = args.num_logprobs;
  const auto num_rows = static_cast<std::size_t>(uploader_.num_samples());  // of logits
  const std::size_t entries = num_rows * (1 + static_cast<std::size_t>(args.num_logprobs));
  cuda::copy_async(*parts_.stream, result.logprob_token_ids, args.logprob_token_ids.data, entries * 4);
  cuda::copy_async(*parts_.stream, result.logprobs, args.logprobs.data, entries * 4);
  cuda::copy_async(*parts_.stream, result.ranks, args.ranks.data, num_rows * 4);
}

void CudaExecutor::settle(StepPlan& plan) {
  parts_.stream->wait();
  results_->read_all();
  auto& ids = plan.inputs.input_token_ids;
  const auto fetch = [](auto& values, const void* from) {
    using Value = typename std::remove_reference_t<decltype(values)>::value_type;
    if (!values.empty()) cuda::copy_and_wait(values.data(), from, values.size() * sizeof(Value));
  };
  if (drafts_ || std::any_of(ids.begin(), ids.end(), [](std::int32_t id) { return id < 0; }))
    fetch(ids, uploader_.inputs().input_ids.data);
  if (!drafts_) return;
  const StepArrays& arrays = uploader_.arrays();
  fetch(plan.inputs.positions, arrays.positions);
  fetch(plan.attention.seq_lens, arrays.seq_lens);
  fetch(plan.attention.slot_mapping, arrays.slot_mapping);
  fetch(plan.gdn.view.num_accepted_tokens, arrays.num_accepted);
}

}  // namespace deltaic

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <deltaic/runner.h>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/loader/checkpoint.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/dense_forward.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/runner/attention_metadata.h"
#include "cpp/src/runner/batch_reorder.h"
#include "cpp/src/runner/batch_update.h"
#include "cpp/src/runner/cache_groups.h"
#include "cpp/src/runner/gdn_metadata.h"
#include "cpp/src/runner/input_batch.h"
#include "cpp/src/runner/kv_caches.h"
#include "cpp/src/runner/sampling.h"
#include "cpp/src/runner/state_copies.h"
#include "cpp/src/runner/state_slots.h"
#include "cpp/src/runner/step_checks.h"

namespace deltaic {

namespace {

// Lists that a hand-made config may leave out: without a mamba group every layer is full attention.
ModelConfig with_layer_lists(ModelConfig model, const KVCacheConfig& kv_cache) {
  const auto num_layers = static_cast<std::size_t>(model.num_layers);
  const bool has_mamba_group = std::any_of(kv_cache.groups.begin(), kv_cache.groups.end(), is_mamba_group);
  if (model.layer_kinds.empty() && !has_mamba_group) model.layer_kinds.assign(num_layers, LayerKind::full_attention);
  if (model.is_moe_layer.empty()) model.is_moe_layer.assign(num_layers, model.num_experts > 0);
  DELTAIC_CHECK(model.layer_kinds.size() == num_layers, "layer_kinds has ", model.layer_kinds.size(),
                " entries, num_layers is ", num_layers);
  DELTAIC_CHECK(model.is_moe_layer.size() == num_layers, "is_moe_layer has ", model.is_moe_layer.size(),
                " entries, num_layers is ", num_layers);
  return model;
}

TensorView view_of(const std::vector<std::int32_t>& values) {
  return make_view(const_cast<std::int32_t*>(values.data()), DType::i32, {static_cast<std::int64_t>(values.size())});
}
TensorView view_of(const std::vector<std::int64_t>& values) {
  return make_view(const_cast<std::int64_t*>(values.data()), DType::i64, {static_cast<std::int64_t>(values.size())});
}
TensorView view_of(const std::vector<std::uint8_t>& values) {
  return make_view(const_cast<std::uint8_t*>(values.data()), DType::u8, {static_cast<std::int64_t>(values.size())});
}

}  // namespace

ModelRunnerOutput AsyncModelRunnerOutput::get_output() {
  DELTAIC_CHECK(output_.has_value(), "get_output() was called twice for one step");
  ModelRunnerOutput output = std::move(*output_);
  output_.reset();
  return output;
}

struct ModelRunner::Impl {
  Impl(const ModelConfig& config, const Checkpoint& checkpoint, const KVCacheConfig& kv_cache_config,
       const RunnerOptions& runner_options)
      : model(with_layer_lists(config, kv_cache_config)),
        kv_cache(kv_cache_config),
        options(runner_options),
        groups(resolve_cache_groups(model, kv_cache, options)),
        threads(std::make_unique<ThreadPool>(options.num_threads)),
        ctx{.device = options.device, .stream = {}, .threads = threads.get()},
        weights(load_decoder_weights(model, checkpoint, {.device = options.device})),
        caches(model, groups, kv_cache.num_blocks, options),
        decoder(model, weights, ctx,
                {.max_num_tokens = options.max_num_batched_tokens,
                 .max_num_seqs = options.max_num_reqs,
                 .max_model_len = options.max_model_len,
                 .max_num_decodes = options.max_num_reqs,
                 .max_decode_query_len = 1 + options.num_speculative_tokens}),
        sampler(model.vocab_size, options.max_num_reqs, ctx),
        copier(caches.state()),
        batch(options.max_num_reqs, groups.block_table_row_strides),
        snapshot_tokens(static_cast<std::size_t>(groups.num_snapshot_slots), -1) {
    if (groups.gdn_group >= 0) slots.emplace(groups.num_running_slots, 1 + options.num_speculative_tokens);
  }

  StateSlots* slots_or_null() { return slots ? &*slots : nullptr; }

  std::optional<ModelRunnerOutput> execute(const SchedulerOutput& step);
  ModelRunnerOutput sample();
  void assign_state_slots();
  void build_metadata(int num_decodes);
  void copy_states(const SchedulerOutput& step, StateCopyKind kind);
  TensorView forward();

  ModelConfig model;
  KVCacheConfig kv_cache;
  RunnerOptions options;
  CacheGroups groups;
  std::unique_ptr<ThreadPool> threads;
  ops::Context ctx;
  std::shared_ptr<const DecoderWeights> weights;
  KvCaches caches;
  HybridDecoder decoder;
  StepSampler sampler;
  StateCopier copier;

  InputBatch batch;
  BatchReorder reorder;
  std::map<std::string, BatchRow> preempted;
  std::optional<StateSlots> slots;   // none without GDN layers
  std::vector<int> snapshot_tokens;  // tokens whose state each snapshot slot holds; -1: none

  // The last step. It runs rows [0, num_rows); hidden_states is unset once it was sampled.
  int num_rows = 0;
  std::optional<TensorView> hidden_states;
  StepInputs inputs;
  AttentionMetadataView attention;  // its block_table is filled when somebody asks
  GdnMetadata gdn;
};

std::optional<ModelRunnerOutput> ModelRunner::Impl::execute(const SchedulerOutput& step) {
  check_step(step, {.batch = batch,
                    .preempted = preempted,
                    .slots = slots_or_null(),
                    .snapshot_tokens = snapshot_tokens,
                    .groups = groups,
                    .options = options,
                    .num_blocks = kv_cache.num_blocks,
                    .vocab_size = model.vocab_size});
  hidden_states.reset();
  update_batch(step, batch, preempted, slots_or_null());
  const auto counts = reorder.apply(batch);
  num_rows = batch.num_reqs() - counts[static_cast<std::size_t>(RowRegion::idle)];
  build_step_inputs(batch, num_rows, options.async_input_combine, inputs);
  if (num_rows > 0 && slots) assign_state_slots();
  build_metadata(counts[static_cast<std::size_t>(RowRegion::decode)]);
  if (num_rows == 0) return ModelRunnerOutput{};

  copy_states(step, StateCopyKind::hit);
  hidden_states = forward();
  copy_states(step, StateCopyKind::snapshot);
  return std::nullopt;
}

void ModelRunner::Impl::assign_state_slots() {
  slots->reclaim();
  for (int i = 0; i < num_rows; ++i)
    if (BatchRow& row = batch.row(i); row.state_slot < 0) row.state_slot = slots->assign(row.req_id);
}

void ModelRunner::Impl::build_metadata(int num_decodes) {
  build_attention_metadata(batch, num_rows, groups.full_attn_group, groups.block_size(), attention);
  attention.block_table.clear();
  if (slots) build_gdn_metadata(batch, num_rows, num_decodes, inputs.query_start_loc, groups.num_running_slots, gdn);
}

void ModelRunner::Impl::copy_states(const SchedulerOutput& step, StateCopyKind kind) {
  for (const StateCopy& copy : step.state_copies) {
    if (copy.kind != kind) continue;
    const int running_slot = batch.row(batch.find(copy.req_id)).state_slot;
    if (kind == StateCopyKind::hit) {
      copier.add(copy.snapshot_slot, running_slot);
    } else {
      copier.add(running_slot, copy.snapshot_slot);
      snapshot_tokens[static_cast<std::size_t>(copy.snapshot_slot - groups.num_running_slots)] = copy.num_tokens;
    }
  }
  copier.run(ctx);
}

TensorView ModelRunner::Impl::forward() {
  ForwardInputs step{.input_ids = view_of(inputs.input_token_ids),
                     .positions = view_of(inputs.positions).reshape({1, inputs.query_start_loc.back()}),
                     .query_start_loc = view_of(inputs.query_start_loc),
                     .seq_lens = view_of(attention.seq_lens),
                     .block_table = batch.block_table(groups.full_attn_group).view(num_rows),
                     .slot_mapping = view_of(attention.slot_mapping),
                     .gdn = {}};
  if (slots)
    step.gdn = {.query_start_loc = step.query_start_loc,
                .state_indices = view_of(gdn.view.state_indices),
                .has_initial_state = view_of(gdn.has_initial_state)};
  return decoder.forward(step, caches.views());
}

ModelRunnerOutput ModelRunner::Impl::sample() {
  DELTAIC_CHECK(hidden_states.has_value(), "sample_tokens needs a forward that was not sampled yet");
  const TensorView hidden = *hidden_states;
  hidden_states.reset();
  return sampler.sample(decoder, hidden, inputs, num_rows, batch);
}

ModelRunner::ModelRunner(const std::filesystem::path& checkpoint, const KVCacheConfig& kv_cache,
                         const RunnerOptions& options)
    : impl_(std::make_unique<Impl>(load_model_config(checkpoint), Checkpoint::open(checkpoint), kv_cache, options)) {}
ModelRunner::ModelRunner(const ModelConfig& model, const TensorMap& tensors, const KVCacheConfig& kv_cache,
                         const RunnerOptions& options)
    : impl_(std::make_unique<Impl>(model, Checkpoint::from_memory(tensors), kv_cache, options)) {}
ModelRunner::~ModelRunner() = default;
ModelRunner::ModelRunner(ModelRunner&&) noexcept = default;
ModelRunner& ModelRunner::operator=(ModelRunner&&) noexcept = default;

std::optional<ModelRunnerOutput> ModelRunner::execute_model(const SchedulerOutput& input) {
  return impl_->execute(input);
}
ModelRunnerOutput ModelRunner::sample_tokens() { return impl_->sample(); }
AsyncModelRunnerOutput ModelRunner::sample_tokens_async() { return AsyncModelRunnerOutput(impl_->sample()); }

const ModelConfig& ModelRunner::model_config() const { return impl_->model; }
const KVCacheConfig& ModelRunner::kv_cache_config() const { return impl_->kv_cache; }
const RunnerOptions& ModelRunner::options() const { return impl_->options; }
int ModelRunner::full_attn_group_id() const { return impl_->groups.full_attn_group; }
int ModelRunner::gdn_group_id() const { return impl_->groups.gdn_group; }
std::int64_t ModelRunner::num_blocks() const { return impl_->kv_cache.num_blocks; }
std::int64_t ModelRunner::fa_page_size_bytes() const { return impl_->groups.fa_page_size_bytes; }
int ModelRunner::num_state_slots() const { return impl_->groups.num_state_slots(); }
std::int64_t ModelRunner::weight_bytes() const { return impl_->weights->num_bytes; }
std::int64_t ModelRunner::cache_bytes() const { return impl_->caches.num_bytes(); }
const std::vector<ModelRunner::LayerKvCache>& ModelRunner::attn_kv() const { return impl_->caches.attention(); }
const std::vector<ModelRunner::LayerStateCache>& ModelRunner::gdn_state() const { return impl_->caches.state(); }
std::map<std::string, int> ModelRunner::gdn_state_slots() const {
  return impl_->slots ? impl_->slots->first_slots() : std::map<std::string, int>{};
}
const InputBatch& ModelRunner::input_batch() const { return impl_->batch; }
const StepInputs& ModelRunner::last_step() const { return impl_->inputs; }
const GdnMetadataView& ModelRunner::last_gdn_meta() const { return impl_->gdn.view; }

// The table is too wide to be copied in every step.
const AttentionMetadataView& ModelRunner::last_attn_meta() const {
  AttentionMetadataView& attention = impl_->attention;
  const TensorView table = impl_->batch.block_table(impl_->groups.full_attn_group).view(impl_->num_rows);
  attention.block_table.assign(table.as<std::int32_t>(), table.as<std::int32_t>() + table.numel());
  return attention;
}

DenseForwardOutput ModelRunner::dense_forward(std::span<const std::int32_t> token_ids, bool with_hidden,
                                              std::span<const std::int64_t> positions) {
  return deltaic::dense_forward(impl_->model, impl_->weights, impl_->ctx, token_ids, with_hidden, positions);
}

}  // namespace deltaic

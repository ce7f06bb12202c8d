#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <deltaic/runner.h>

#include "cpp/src/check.h"
#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/core/matmul.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/loader/checkpoint.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/dense_draft.h"
#include "cpp/src/models/dense_forward.h"
#include "cpp/src/runner/cache_groups.h"
#include "cpp/src/runner/cpu_executor.h"
#include "cpp/src/runner/cuda_executor.h"
#include "cpp/src/runner/input_batch.h"
#include "cpp/src/runner/kv_caches.h"
#include "cpp/src/runner/step_plan.h"

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

}  // namespace

AsyncModelRunnerOutput::AsyncModelRunnerOutput(ModelRunnerOutput output)
    : wait_([held = std::make_shared<ModelRunnerOutput>(std::move(output))] { return std::move(*held); }) {}

ModelRunnerOutput AsyncModelRunnerOutput::get_output() {
  DELTAIC_CHECK(wait_ != nullptr, "get_output() was called twice for one step");
  return std::exchange(wait_, nullptr)();
}

namespace {

// What the ops of one runner run on.
struct Engine {
  explicit Engine(const RunnerOptions& options) : threads(options.num_threads) {
    ctx.device = options.device;
    ctx.threads = &threads;
    if (options.device.type == DeviceType::cpu) return;
    stream.emplace();
    matmul = cuda::make_matmul(options.device.index);
    ctx.stream = {stream->handle()};
    ctx.matmul = matmul.get();
  }

  ThreadPool threads;
  std::optional<cuda::Stream> stream;  // CUDA
  std::shared_ptr<cuda::Matmul> matmul;
  ops::Context ctx;
};

constexpr std::uint64_t kDummySeed = 0;

// Dummy weights of the CPU have the dtype that a checkpoint of the model would have, as far as there are such.
WeightPlacement placement_of(const ModelConfig& model, const RunnerOptions& options) {
  const bool is_bf16 = options.dummy_weights && options.device.type == DeviceType::cpu && model.dtype == DType::bf16;
  return {.device = options.device, .dtype = is_bf16 ? DType::bf16 : options.dtype};
}

struct RunnerWeights {
  std::shared_ptr<const DecoderWeights> decoder;
  std::shared_ptr<const MtpWeights> mtp;  // null without a draft group
};
using MakeWeights = std::function<RunnerWeights(const ModelConfig&, WeightPlacement, bool with_mtp)>;

RunnerWeights dummy_weights(const ModelConfig& model, WeightPlacement placement, bool with_mtp) {
  RunnerWeights weights{.decoder = make_dummy_weights(model, placement, kDummySeed), .mtp = nullptr};
  if (with_mtp) weights.mtp = make_dummy_mtp_weights(model, *weights.decoder, kDummySeed);
  return weights;
}

RunnerWeights load_weights(const ModelConfig& model, const Checkpoint& checkpoint, WeightPlacement placement,
                           bool with_mtp) {
  RunnerWeights weights{.decoder = load_decoder_weights(model, checkpoint, placement), .mtp = nullptr};
  if (with_mtp) weights.mtp = load_mtp_weights(model, checkpoint, *weights.decoder);
  return weights;
}

}  // namespace

struct ModelRunner::Impl {
  Impl(const ModelConfig& config, const MakeWeights& make_weights, const KVCacheConfig& kv_cache_config,
       const RunnerOptions& runner_options)
      : model(with_layer_lists(config, kv_cache_config)),
        kv_cache(kv_cache_config),
        options(runner_options),
        groups(resolve_cache_groups(model, kv_cache, options)),
        engine(options),
        weights(make_weights(model, placement_of(model, options), groups.draft_group >= 0)),
        caches(model, groups, kv_cache.num_blocks, options),
        planner(groups, options, kv_cache.num_blocks, model.vocab_size),
        executor(make_executor()) {}

  static std::unique_ptr<Impl> make(const ModelConfig& config, const MakeWeights& make_weights,
                                    const KVCacheConfig& kv_cache_config, const RunnerOptions& runner_options);

  std::unique_ptr<StepExecutor> make_executor();
  std::optional<ModelRunnerOutput> execute(const SchedulerOutput& step);
  AsyncModelRunnerOutput sample();
  // Of the last step, complete.
  StepPlan& settled() {
    const cuda::CurrentDevice device(options.device);
    executor->settle(planner.current());
    return planner.current();
  }

  ModelConfig model;
  KVCacheConfig kv_cache;
  RunnerOptions options;
  CacheGroups groups;
  Engine engine;
  RunnerWeights weights;
  KvCaches caches;
  StepPlanner planner;
  std::unique_ptr<StepExecutor> executor;
  bool can_sample = false;  // a forward ran and was not sampled yet
};

std::unique_ptr<ModelRunner::Impl> ModelRunner::Impl::make(const ModelConfig& config, const MakeWeights& make_weights,
                                                           const KVCacheConfig& kv_cache_config,
                                                           const RunnerOptions& runner_options) {
  if (runner_options.device.type == DeviceType::cuda)
    device_memory(runner_options.device);  // throws without the device
  const cuda::CurrentDevice device(runner_options.device);
  return std::make_unique<Impl>(config, make_weights, kv_cache_config, runner_options);
}

std::unique_ptr<StepExecutor> ModelRunner::Impl::make_executor() {
  const ExecutorParts parts{.model = model,
                            .options = options,
                            .groups = groups,
                            .ctx = engine.ctx,
                            .stream = engine.stream ? &*engine.stream : nullptr,
                            .weights = weights.decoder,
                            .mtp_weights = weights.mtp,
                            .caches = caches,
                            .planner = planner};
  if (options.device.type == DeviceType::cpu) return std::make_unique<CpuExecutor>(parts);
  return std::make_unique<CudaExecutor>(parts);
}

std::optional<ModelRunnerOutput> ModelRunner::Impl::execute(const SchedulerOutput& step) {
  const cuda::CurrentDevice device(options.device);
  // Requests that come back by id alone are prefilled from the tokens in the batch: all must be known.
  if (!step.scheduled_cached_reqs.resumed_req_ids.empty()) executor->settle(planner.current());
  const StepPlan& plan = planner.plan(step);
  can_sample = false;
  if (plan.num_rows == 0) return ModelRunnerOutput{};
  executor->forward(plan);
  can_sample = true;
  return std::nullopt;
}

AsyncModelRunnerOutput ModelRunner::Impl::sample() {
  const cuda::CurrentDevice device(options.device);
  DELTAIC_CHECK(can_sample, "sample_tokens needs a forward that was not sampled yet");
  can_sample = false;
  return executor->sample(planner.current());
}

ModelRunner::ModelRunner(const std::filesystem::path& checkpoint, const KVCacheConfig& kv_cache,
                         const RunnerOptions& options)
    : impl_(Impl::make(
          load_model_config(checkpoint),
          [&](const ModelConfig& model, WeightPlacement placement, bool with_mtp) {
            return options.dummy_weights ? dummy_weights(model, placement, with_mtp)
                                         : load_weights(model, Checkpoint::open(checkpoint), placement, with_mtp);
          },
          kv_cache, options)) {}
ModelRunner::ModelRunner(const ModelConfig& model, const TensorMap& tensors, const KVCacheConfig& kv_cache,
                         const RunnerOptions& options)
    : impl_(Impl::make(
          model,
          [&](const ModelConfig& complete, WeightPlacement placement, bool with_mtp) {
            return options.dummy_weights
                       ? dummy_weights(complete, placement, with_mtp)
                       : load_weights(complete, Checkpoint::from_memory(tensors), placement, with_mtp);
          },
          kv_cache, options)) {}
ModelRunner::~ModelRunner() = default;
ModelRunner::ModelRunner(ModelRunner&&) noexcept = default;
ModelRunner& ModelRunner::operator=(ModelRunner&&) noexcept = default;

std::optional<ModelRunnerOutput> ModelRunner::execute_model(const SchedulerOutput& input) {
  return impl_->execute(input);
}
void ModelRunner::set_step_hook(std::shared_ptr<StepHook> hook) { impl_->executor->set_hook(std::move(hook)); }
ModelRunnerOutput ModelRunner::sample_tokens() { return impl_->sample().get_output(); }
AsyncModelRunnerOutput ModelRunner::sample_tokens_async() { return impl_->sample(); }

const ModelConfig& ModelRunner::model_config() const { return impl_->model; }
const KVCacheConfig& ModelRunner::kv_cache_config() const { return impl_->kv_cache; }
const RunnerOptions& ModelRunner::options() const { return impl_->options; }
int ModelRunner::full_attn_group_id() const { return impl_->groups.full_attn_group; }
int ModelRunner::gdn_group_id() const { return impl_->groups.gdn_group; }
std::int64_t ModelRunner::num_blocks() const { return impl_->kv_cache.num_blocks; }
std::int64_t ModelRunner::fa_page_size_bytes() const { return impl_->groups.fa_page_size_bytes; }
int ModelRunner::num_state_slots() const { return impl_->groups.num_state_slots(); }
std::int64_t ModelRunner::weight_bytes() const {
  const RunnerWeights& weights = impl_->weights;
  return weights.decoder->num_bytes + (weights.mtp ? weights.mtp->block.num_bytes : 0);
}
std::int64_t ModelRunner::cache_bytes() const { return impl_->caches.num_bytes(); }
const std::vector<ModelRunner::LayerKvCache>& ModelRunner::attn_kv() const { return impl_->caches.attention(); }
const std::vector<ModelRunner::LayerStateCache>& ModelRunner::gdn_state() const { return impl_->caches.state(); }
std::map<std::string, int> ModelRunner::gdn_state_slots() const { return impl_->planner.state_slots(); }
const InputBatch& ModelRunner::input_batch() const {
  impl_->settled();
  return impl_->planner.batch();
}
const StepInputs& ModelRunner::last_step() const { return impl_->settled().inputs; }
const GdnMetadataView& ModelRunner::last_gdn_meta() const { return impl_->settled().gdn.view; }

// The table is too wide to be copied in every step.
const AttentionMetadataView& ModelRunner::last_attn_meta() const {
  StepPlan& plan = impl_->settled();
  const TensorView table = impl_->planner.batch().block_table(impl_->groups.full_attn_group).view(plan.num_rows);
  plan.attention.block_table.assign(table.as<std::int32_t>(), table.as<std::int32_t>() + table.numel());
  return plan.attention;
}

DenseForwardOutput ModelRunner::dense_forward(std::span<const std::int32_t> token_ids, bool with_hidden,
                                              std::span<const std::int64_t> positions) {
  const cuda::CurrentDevice device(impl_->options.device);
  return deltaic::dense_forward(impl_->model, impl_->weights.decoder, impl_->engine.ctx, token_ids, with_hidden,
                                positions);
}

DenseDraftOutput ModelRunner::dense_draft(std::span<const std::int32_t> token_ids, std::int32_t next_token,
                                          int num_drafts) {
  const RunnerWeights& weights = impl_->weights;
  DELTAIC_CHECK(weights.mtp != nullptr, "the runner has no draft group, or num_speculative_tokens is 0");
  return deltaic::dense_draft(impl_->model, weights.decoder, weights.mtp, impl_->engine.ctx, token_ids, next_token,
                              num_drafts);
}

}  // namespace deltaic

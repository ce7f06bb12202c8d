#include <algorithm>
#include <limits>

#include <deltaic/cache.h>
#include <deltaic/error.h>

#include "cpp/src/check.h"

namespace deltaic {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t page_bytes(const KVCacheSpec& spec) {
  return std::visit([](const auto& s) { return s.page_size_bytes(); }, spec);
}

// Bytes of one block (attention) or one slot (recurrent state) over all layers of a group. The page of a uniform
// group has the pages of all its layers already.
std::int64_t group_bytes(const KVCacheGroupSpec& group) {
  const bool all_layers = std::holds_alternative<UniformTypeKVCacheSpecs>(group.spec);
  return page_bytes(group.spec) * (all_layers ? 1 : static_cast<std::int64_t>(group.layer_names.size()));
}

// Bytes that a running slot has beside its page, over all layers of a recurrent group.
std::int64_t replay_bytes(const KVCacheGroupSpec& group) {
  if (const auto* uniform = std::get_if<UniformTypeKVCacheSpecs>(&group.spec)) return uniform->replay_bytes();
  return std::get<MambaSpec>(group.spec).replay_bytes() * static_cast<std::int64_t>(group.layer_names.size());
}

bool is_recurrent(const KVCacheGroupSpec& group) {
  if (const auto* uniform = std::get_if<UniformTypeKVCacheSpecs>(&group.spec))
    return !uniform->layer_specs.empty() && std::holds_alternative<MambaSpec>(uniform->layer_specs.begin()->second);
  return std::holds_alternative<MambaSpec>(group.spec);
}

// Bytes of one block of all attention groups, or of one slot of the recurrent ones.
std::int64_t bytes_of_groups(const KVCacheConfig& config, bool recurrent) {
  std::int64_t sum = 0;
  for (const KVCacheGroupSpec& group : config.groups)
    if (is_recurrent(group) == recurrent) sum += group_bytes(group);
  return sum;
}

int block_size_of(const KVCacheSpec& spec) {
  return std::visit([](const auto& s) { return s.block_size; }, spec);
}

void check_group_options(const MemoryPlanOptions& options) {
  DELTAIC_CHECK(options.block_size >= 1, "block_size is ", options.block_size, ", want at least 1");
  DELTAIC_CHECK(options.num_speculative_tokens >= 0, "num_speculative_tokens is ", options.num_speculative_tokens,
                ", want at least 0");
}

void check_plan_options(const MemoryPlanOptions& options) {
  DELTAIC_CHECK(options.memory_bytes >= 0, "memory_bytes is ", options.memory_bytes, ", want at least 0");
  DELTAIC_CHECK(options.max_model_len >= 1, "max_model_len is ", options.max_model_len, ", want at least 1");
  DELTAIC_CHECK(options.max_num_seqs >= 1, "max_num_seqs is ", options.max_num_seqs, ", want at least 1");
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  DELTAIC_CHECK(!options.num_blocks || (*options.num_blocks >= 2 && *options.num_blocks < kMax), "num_blocks is ",
                options.num_blocks.value_or(0), ", want 2 to ", kMax - 1, " (block 0 is never handed out)");
  DELTAIC_CHECK(!options.num_snapshot_slots || *options.num_snapshot_slots >= 0, "num_snapshot_slots is ",
                options.num_snapshot_slots.value_or(0), ", want at least 0");
  DELTAIC_CHECK(options.enable_prefix_caching || options.num_snapshot_slots.value_or(0) == 0, "num_snapshot_slots is ",
                options.num_snapshot_slots.value_or(0), ", which needs enable_prefix_caching");
}

// What the division needs to know, in bytes and blocks.
struct Costs {
  std::int64_t block = 0;           // of all attention layers
  std::int64_t slot = 0;            // of all recurrent layers; 0 without such
  std::int64_t replay = 0;          // a running slot has so many bytes more
  std::int64_t num_running = 0;     // state slots
  std::int64_t request_blocks = 0;  // of max_model_len tokens
  std::int64_t running() const { return num_running * (slot + replay); }
};

// What would make it fit.
std::string remedy(const MemoryPlanOptions& options, const Costs& costs) {
  if (options.num_blocks || options.num_snapshot_slots)
    return detail::concat("lower ", options.num_blocks ? "num_blocks" : "",
                          options.num_blocks && options.num_snapshot_slots ? " or " : "",
                          options.num_snapshot_slots ? "num_snapshot_slots" : "", ", or give more memory");
  const std::int64_t blocks_fit = (options.memory_bytes - costs.running()) / costs.block - 1;
  const std::int64_t len_fit = blocks_fit * options.block_size;
  const std::int64_t rest = options.memory_bytes - (1 + costs.request_blocks) * costs.block;
  const std::int64_t seqs_fit = costs.slot > 0 && rest > 0 ? rest / (costs.slot + costs.replay) : 0;
  std::string text;
  if (len_fit > 0) text += detail::concat("lower max_model_len to ", len_fit, ", ");
  if (seqs_fit > 0) text += detail::concat("lower max_num_seqs to ", seqs_fit, ", ");
  return text + (text.empty() ? "give more memory, or lower max_model_len and max_num_seqs" : "or give more memory");
}

void check_fits(const MemoryPlanOptions& options, const Costs& costs, std::int64_t num_blocks,
                std::int64_t num_snapshots) {
  const std::int64_t needed = costs.running() + num_blocks * costs.block + num_snapshots * costs.slot;
  if (needed <= options.memory_bytes) return;
  throw OutOfMemory(detail::concat(
      "the caches need ", needed, " bytes, memory_bytes is ", options.memory_bytes, ": ", costs.running(), " for ",
      costs.num_running, " running states (max_num_seqs ", options.max_num_seqs, ", num_speculative_tokens ",
      options.num_speculative_tokens, "), ", num_blocks * costs.block, " for ", num_blocks, " blocks of ",
      options.block_size, " tokens, ", num_snapshots * costs.slot, " for ", num_snapshots,
      " snapshots; one request of max_model_len ", options.max_model_len, " takes ", costs.request_blocks,
      " blocks and block 0 is never handed out: ", remedy(options, costs)));
}

// Rounds down to what fits a block id.
std::int64_t clamp_blocks(std::int64_t num_blocks) {
  return std::min<std::int64_t>(num_blocks, std::numeric_limits<int>::max() - 1);
}

// More snapshots than boundaries in the cached tokens could never be reached.
std::int64_t max_useful_snapshots(const MemoryPlanOptions& options, std::int64_t num_blocks) {
  return (num_blocks - 1) * options.block_size / options.mamba_block_size;
}

KVCacheGroupSpec make_recurrent_group(const ModelConfig& model, const MemoryPlanOptions& options,
                                      std::vector<std::string> layer_names) {
  DELTAIC_CHECK(options.mamba_block_size >= 1 && options.mamba_block_size % options.block_size == 0,
                "mamba_block_size is ", options.mamba_block_size, ", want a multiple of block_size ",
                options.block_size);
  MambaSpec spec{.block_size = options.mamba_block_size,
                 .shapes = {{model.conv_dim(), model.linear_conv_kernel_dim - 1 + options.num_speculative_tokens},
                            {model.linear_num_value_heads, model.linear_value_head_dim, model.linear_key_head_dim}},
                 .dtypes = {options.conv_state_dtype, options.recurrent_state_dtype},
                 .mamba_type = MambaType::gdn,
                 .cache_mode = options.enable_prefix_caching ? MambaCacheMode::align : MambaCacheMode::none,
                 .num_speculative_blocks = options.num_speculative_tokens,
                 .page_size_padded = {}};
  return {.layer_names = std::move(layer_names), .spec = std::move(spec)};
}

}  // namespace

KVCacheConfig make_kv_cache_groups(const ModelConfig& model, const MemoryPlanOptions& options) {
  check_group_options(options);
  KVCacheGroupSpec attention, recurrent;
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const auto i = static_cast<std::size_t>(layer);
    const bool linear = i < model.layer_kinds.size() && model.layer_kinds[i] == LayerKind::linear_attention;
    (linear ? recurrent : attention).layer_names.push_back("model.layers." + std::to_string(layer));
  }
  if (attention.layer_names.empty())
    throw Unsupported(detail::concat("a model without full-attention layers (", model.num_layers, " layers)"));
  attention.spec = FullAttentionSpec{.block_size = options.block_size,
                                     .num_kv_heads = model.num_kv_heads,
                                     .head_size = model.head_dim,
                                     .head_size_v = model.head_dim,
                                     .dtype = options.kv_dtype,
                                     .page_size_padded = {}};
  KVCacheGroupSpec draft{.layer_names = {"mtp.layers.0"}, .spec = attention.spec, .is_eagle_group = true};
  KVCacheConfig config;
  config.groups.push_back(std::move(attention));
  if (!recurrent.layer_names.empty())
    config.groups.push_back(make_recurrent_group(model, options, std::move(recurrent.layer_names)));
  if (options.with_draft_module) config.groups.push_back(std::move(draft));
  return config;
}

KVCacheConfig plan_kv_cache(const ModelConfig& model, const MemoryPlanOptions& options) {
  check_plan_options(options);
  KVCacheConfig config = make_kv_cache_groups(model, options);
  const std::int64_t slot_bytes = bytes_of_groups(config, /*recurrent=*/true);
  const bool hybrid = slot_bytes > 0;
  std::int64_t replay = 0;
  for (const KVCacheGroupSpec& group : config.groups)
    if (is_recurrent(group)) replay += replay_bytes(group);
  const Costs costs{.block = bytes_of_groups(config, /*recurrent=*/false),
                    .slot = slot_bytes,
                    .replay = replay,
                    .num_running = hybrid ? options.max_num_seqs : 0,
                    .request_blocks = ceil_div(options.max_model_len, options.block_size)};
  const bool with_snapshots =
      hybrid && options.enable_prefix_caching && options.max_model_len > options.mamba_block_size;

  std::int64_t num_blocks = options.num_blocks.value_or(0);
  std::int64_t num_snapshots = with_snapshots ? options.num_snapshot_slots.value_or(0) : 0;
  if (options.num_blocks && *options.num_blocks <= costs.request_blocks)
    throw OutOfMemory(detail::concat("num_blocks ", *options.num_blocks, " holds ",
                                     (*options.num_blocks - 1) * options.block_size,
                                     " tokens (block 0 is never handed out), max_model_len is ", options.max_model_len,
                                     ": raise num_blocks to ", costs.request_blocks + 1, " or lower max_model_len"));
  const bool all_given = options.num_blocks && (options.num_snapshot_slots || !with_snapshots);
  if (!all_given || options.memory_bytes > 0)
    check_fits(options, costs, std::max(num_blocks, 1 + costs.request_blocks), num_snapshots);

  if (!all_given) {
    const std::int64_t rest = options.memory_bytes - costs.running();
    if (with_snapshots && !options.num_snapshot_slots) {
      const std::int64_t spare = rest - std::max(num_blocks, 1 + costs.request_blocks) * costs.block;
      // num_blocks given: the snapshots have no one to share the rest with.
      num_snapshots = (options.num_blocks ? spare : spare / 4) / costs.slot;
    }
    if (!options.num_blocks) num_blocks = clamp_blocks((rest - num_snapshots * costs.slot) / costs.block);
    if (with_snapshots && !options.num_snapshot_slots) {
      num_snapshots = std::min(num_snapshots, max_useful_snapshots(options, num_blocks));
      if (!options.num_blocks) num_blocks = clamp_blocks((rest - num_snapshots * costs.slot) / costs.block);
    }
    if (!options.num_blocks && !options.enable_prefix_caching)
      num_blocks = std::min(num_blocks, 1 + options.max_num_seqs * costs.request_blocks);
  }
  config.num_blocks = num_blocks;
  config.num_running_slots = static_cast<int>(costs.num_running);
  config.num_snapshot_slots = static_cast<int>(num_snapshots);
  return config;
}

CacheCapacity cache_capacity(const KVCacheConfig& config, int max_model_len) {
  DELTAIC_CHECK(max_model_len >= 1, "max_model_len is ", max_model_len, ", want at least 1");
  CacheCapacity capacity;
  for (const KVCacheGroupSpec& group : config.groups) {
    const std::int64_t bytes = group_bytes(group);
    if (is_recurrent(group)) {
      DELTAIC_CHECK(config.num_running_slots.has_value(), "num_running_slots is not set");
      capacity.running_state_bytes += (bytes + replay_bytes(group)) * *config.num_running_slots;
      capacity.snapshot_bytes += bytes * config.num_snapshot_slots;
    } else {
      capacity.kv_bytes += bytes * config.num_blocks;
      if (group.is_eagle_group || capacity.num_tokens > 0) continue;
      const int block_size = block_size_of(group.spec);
      DELTAIC_CHECK(block_size >= 1, "block_size is ", block_size, ", want at least 1");
      const std::int64_t num_usable = std::max<std::int64_t>(config.num_blocks - 1, 0);
      capacity.num_tokens = num_usable * block_size;
      capacity.max_concurrency =
          static_cast<double>(num_usable) / static_cast<double>(ceil_div(max_model_len, block_size));
    }
  }
  return capacity;
}

}  // namespace deltaic

#include "cpp/src/runner/cache_groups.h"

#include <algorithm>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

bool is_cache_dtype(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16; }

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// The first layer spec of a uniform group, or the group's own; null when the group is of another kind.
template <class Spec>
const Spec* first_spec(const KVCacheSpec& spec) {
  if (const auto* single = std::get_if<Spec>(&spec)) return single;
  const auto* uniform = std::get_if<UniformTypeKVCacheSpecs>(&spec);
  if (uniform == nullptr || uniform->layer_specs.empty()) return nullptr;
  return std::get_if<Spec>(&uniform->layer_specs.begin()->second);
}

// One spec a layer of the group.
template <class Spec>
std::vector<Spec> layer_specs(const KVCacheGroupSpec& group, const std::string& group_name, int num_layers) {
  DELTAIC_CHECK(group.layer_names.empty() || group.layer_names.size() == static_cast<std::size_t>(num_layers),
                group_name, " names ", group.layer_names.size(), " layers, the model has ", num_layers,
                " of that kind");
  if (const auto* single = std::get_if<Spec>(&group.spec))
    return std::vector<Spec>(static_cast<std::size_t>(num_layers), *single);
  const auto& uniform = std::get<UniformTypeKVCacheSpecs>(group.spec);
  DELTAIC_CHECK(group.layer_names.size() == static_cast<std::size_t>(num_layers), group_name,
                " has a spec for each layer, so it must name the model's ", num_layers, " layers of that kind");
  std::vector<Spec> specs;
  for (const std::string& layer_name : group.layer_names) {
    const auto found = uniform.layer_specs.find(layer_name);
    DELTAIC_CHECK(found != uniform.layer_specs.end(), group_name, " has no spec for its layer ", layer_name);
    const auto* spec = std::get_if<Spec>(&found->second);
    DELTAIC_CHECK(spec != nullptr, group_name, ": layer ", layer_name, " has a spec of another kind");
    specs.push_back(*spec);
  }
  return specs;
}

void check_attention_spec(const FullAttentionSpec& spec, const ModelConfig& model, const std::string& group_name) {
  DELTAIC_CHECK(spec.block_size >= 1, group_name, ": block_size is ", spec.block_size, ", at least 1 is needed");
  if (spec.head_size_v != 0 && spec.head_size_v != spec.head_size)
    throw Unsupported(detail::concat(group_name, ": head_size_v is ", spec.head_size_v, " but head_size is ",
                                     spec.head_size, "; V heads of another size than K heads are not supported"));
  DELTAIC_CHECK(spec.num_kv_heads == model.num_kv_heads, group_name, ": num_kv_heads is ", spec.num_kv_heads,
                ", the model has ", model.num_kv_heads);
  DELTAIC_CHECK(spec.head_size == model.head_dim, group_name, ": head_size is ", spec.head_size, ", the model has ",
                model.head_dim);
  DELTAIC_CHECK(is_cache_dtype(spec.dtype), group_name, ": dtype is ", name(spec.dtype),
                ", f32, f16 or bf16 is needed");
  DELTAIC_CHECK(spec.page_size_bytes() % static_cast<std::int64_t>(size_of(spec.dtype)) == 0, group_name,
                ": page_size_padded is ", spec.page_size_bytes(), " bytes, not a multiple of ", size_of(spec.dtype),
                " (", name(spec.dtype), ")");
}

void check_state_spec(const MambaSpec& spec, const ModelConfig& model, const RunnerOptions& options,
                      const std::string& group_name) {
  if (spec.mamba_type != MambaType::gdn)
    throw Unsupported(group_name + ": mamba_type is not gdn, and the model's recurrent layers are");
  DELTAIC_CHECK(spec.block_size >= 1, group_name, ": block_size is ", spec.block_size, ", at least 1 is needed");
  DELTAIC_CHECK(spec.shapes.size() == 2 && spec.dtypes.size() == 2, group_name, " has ", spec.shapes.size(),
                " shapes and ", spec.dtypes.size(), " dtypes; a GDN layer has 2 states, conv and temporal");
  const std::vector<std::int64_t> conv{model.conv_dim(),
                                       model.linear_conv_kernel_dim - 1 + options.num_speculative_tokens};
  const std::vector<std::int64_t> temporal{model.linear_num_value_heads, model.linear_value_head_dim,
                                           model.linear_key_head_dim};
  DELTAIC_CHECK(spec.shapes[0] == conv, group_name, ": the conv state is ", shape_text(spec.shapes[0]),
                ", the model needs [conv_dim, kernel - 1 + speculative tokens] = ", shape_text(conv));
  DELTAIC_CHECK(spec.shapes[1] == temporal, group_name, ": the temporal state is ", shape_text(spec.shapes[1]),
                ", the model needs [value heads, value head dim, key head dim] = ", shape_text(temporal));
  for (const DType dtype : spec.dtypes)
    DELTAIC_CHECK(is_cache_dtype(dtype), group_name, ": a state dtype is ", name(dtype),
                  ", f32, f16 or bf16 is needed");
}

void check_options(const RunnerOptions& options, const KVCacheConfig& kv_cache) {
  DELTAIC_CHECK(is_cache_dtype(options.dtype), "dtype is ", name(options.dtype), ", f32, f16 or bf16 is needed");
  const bool is_cpu = options.device.type == DeviceType::cpu;
  DELTAIC_CHECK(!is_cpu || options.dtype == DType::f32, "dtype is ", name(options.dtype), ", the CPU computes in f32");
  constexpr int kMaxDecodes = 1024;  // of one launch of paged attention
  DELTAIC_CHECK(is_cpu || options.max_num_reqs <= kMaxDecodes, "max_num_reqs is ", options.max_num_reqs,
                ", on CUDA at most ", kMaxDecodes, " requests run at once");
  if (is_cpu && options.scripted_draft_acceptance >= 0.0F)
    throw Unsupported("scripted_draft_acceptance is for benches on CUDA");
  if (options.parallel.tensor_parallel_size != 1 || options.parallel.rank != 0)
    throw Unsupported(detail::concat("tensor_parallel_size is ", options.parallel.tensor_parallel_size, " and rank ",
                                     options.parallel.rank, "; this version runs a model on one device"));
  DELTAIC_CHECK(options.max_num_reqs >= 1, "max_num_reqs is ", options.max_num_reqs, ", at least 1 is needed");
  DELTAIC_CHECK(options.max_model_len >= 1, "max_model_len is ", options.max_model_len, ", at least 1 is needed");
  DELTAIC_CHECK(options.max_num_batched_tokens >= 1, "max_num_batched_tokens is ", options.max_num_batched_tokens,
                ", at least 1 is needed");
  DELTAIC_CHECK(options.num_speculative_tokens >= 0, "num_speculative_tokens is ", options.num_speculative_tokens,
                ", it cannot be negative");
  DELTAIC_CHECK(options.num_threads >= 0, "num_threads is ", options.num_threads, ", it cannot be negative");
  DELTAIC_CHECK(kv_cache.num_blocks >= 1, "num_blocks is ", kv_cache.num_blocks, ", at least 1 is needed");
  DELTAIC_CHECK(kv_cache.num_snapshot_slots >= 0, "num_snapshot_slots is ", kv_cache.num_snapshot_slots,
                ", it cannot be negative");
}

// What one request of max_model_len tokens can need in the table of a group.
std::int64_t row_stride(const KVCacheSpec& spec, const RunnerOptions& options, const std::string& group_name) {
  const auto blocks_for = [&](std::int64_t num_tokens, int block_size) {
    DELTAIC_CHECK(block_size >= 1, group_name, ": block_size is ", block_size, ", at least 1 is needed");
    return (num_tokens + block_size - 1) / block_size;
  };
  const std::int64_t length = options.max_model_len;
  if (const auto* attention = first_spec<FullAttentionSpec>(spec))
    return blocks_for(length + options.num_speculative_tokens, attention->block_size);
  return blocks_for(length, first_spec<MambaSpec>(spec)->block_size) + options.num_speculative_tokens;
}

}  // namespace

bool is_mamba_group(const KVCacheGroupSpec& group) { return first_spec<MambaSpec>(group.spec) != nullptr; }

CacheGroups resolve_cache_groups(const ModelConfig& model, const KVCacheConfig& kv_cache,
                                 const RunnerOptions& options) {
  check_options(options, kv_cache);
  CacheGroups groups;
  for (std::size_t i = 0; i < kv_cache.groups.size(); ++i) {
    const KVCacheGroupSpec& group = kv_cache.groups[i];
    const bool is_attention = first_spec<FullAttentionSpec>(group.spec) != nullptr;
    groups.group_names.push_back(detail::concat("KV-cache group ", i, is_attention ? " (full attention)" : " (mamba)"));
    const std::string& group_name = groups.group_names.back();
    DELTAIC_CHECK(is_attention || is_mamba_group(group), "KV-cache group ", i, " has no layer spec");
    if (is_attention) {
      const bool is_target = groups.full_attn_group < 0 && !group.is_eagle_group;
      if (is_target)
        groups.full_attn_group = static_cast<int>(i);
      else if (groups.draft_group < 0 && options.num_speculative_tokens > 0)
        groups.draft_group = static_cast<int>(i);
    } else {
      if (groups.gdn_group >= 0) throw Unsupported(group_name + ": a second mamba group is not supported");
      groups.gdn_group = static_cast<int>(i);
    }
    groups.block_table_row_strides.push_back(row_stride(group.spec, options, group_name));
  }
  DELTAIC_CHECK(groups.full_attn_group >= 0, "the KV-cache config has ", kv_cache.groups.size(),
                " groups and none is a full-attention group of the target model");

  const int num_gdn_layers = model.num_layers_of(LayerKind::linear_attention);
  const auto full_attn = static_cast<std::size_t>(groups.full_attn_group);
  const std::string& full_attn_name = groups.group_names[full_attn];
  groups.attention_specs =
      layer_specs<FullAttentionSpec>(kv_cache.groups[full_attn], full_attn_name, model.num_layers - num_gdn_layers);
  DELTAIC_CHECK(!groups.attention_specs.empty(), full_attn_name, ": the model has no full-attention layer");
  for (const FullAttentionSpec& spec : groups.attention_specs) {
    check_attention_spec(spec, model, full_attn_name);
    DELTAIC_CHECK(spec.block_size == groups.block_size(), full_attn_name, ": block sizes ", groups.block_size(),
                  " and ", spec.block_size, " in one group");
  }
  groups.fa_page_size_bytes =
      std::visit([](const auto& spec) { return spec.page_size_bytes(); }, kv_cache.groups[full_attn].spec);

  if (groups.draft_group >= 0) {
    const auto draft = static_cast<std::size_t>(groups.draft_group);
    const std::string& draft_name = groups.group_names[draft];
    groups.draft_spec = layer_specs<FullAttentionSpec>(kv_cache.groups[draft], draft_name, 1).front();
    check_attention_spec(groups.draft_spec, model, draft_name);
    DELTAIC_CHECK(groups.draft_spec.block_size == groups.block_size(), draft_name, ": block_size is ",
                  groups.draft_spec.block_size, ", the target's is ", groups.block_size(),
                  "; the draft module uses the target's blocks");
  }

  DELTAIC_CHECK((groups.gdn_group >= 0) == (num_gdn_layers > 0), "the model has ", num_gdn_layers,
                " recurrent layers, and the KV-cache config has ", groups.gdn_group >= 0 ? "a" : "no", " mamba group");
  if (groups.gdn_group < 0) return groups;

  const auto gdn = static_cast<std::size_t>(groups.gdn_group);
  const std::string& gdn_name = groups.group_names[gdn];
  groups.state_specs = layer_specs<MambaSpec>(kv_cache.groups[gdn], gdn_name, num_gdn_layers);
  for (MambaSpec& spec : groups.state_specs) {
    check_state_spec(spec, model, options, gdn_name);
    spec.num_speculative_blocks = options.num_speculative_tokens;
  }
  groups.num_running_slots = kv_cache.num_running_slots.value_or(options.max_num_reqs);
  groups.num_snapshot_slots = kv_cache.num_snapshot_slots;
  DELTAIC_CHECK(groups.num_running_slots >= 1, "num_running_slots is ", groups.num_running_slots,
                ", one request alone needs 1");
  return groups;
}

}  // namespace deltaic

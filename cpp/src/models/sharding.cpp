#include "cpp/src/models/sharding.h"

#include <algorithm>
#include <initializer_list>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

void check_divides(std::string_view field, std::int64_t value, const ParallelConfig& parallel) {
  DELTAIC_CHECK(value % parallel.tensor_parallel_size == 0, field, " is ", value, ", not a multiple of the ",
                parallel.tensor_parallel_size, " ranks of tensor_parallel_size");
}

void check_parallel(const ModelConfig& config, const ParallelConfig& parallel) {
  const int size = parallel.tensor_parallel_size;
  DELTAIC_CHECK(size >= 1, "tensor_parallel_size is ", size, ", it must be above 0");
  DELTAIC_CHECK(0 <= parallel.rank && parallel.rank < size, "rank ", parallel.rank, " of ", size);
  check_divides("num_attention_heads", config.num_heads, parallel);
  // Fewer K/V heads than ranks: each head is on several ranks, whole.
  if (config.num_kv_heads > size) check_divides("num_key_value_heads", config.num_kv_heads, parallel);
  DELTAIC_CHECK(config.num_kv_heads <= 0 || config.num_kv_heads >= size || size % config.num_kv_heads == 0,
                "num_key_value_heads is ", config.num_kv_heads, ", and tensor_parallel_size ", size,
                " is not a multiple of it");
  check_divides("linear_num_key_heads", config.linear_num_key_heads, parallel);
  check_divides("intermediate_size", config.intermediate_size, parallel);
  check_divides("moe_intermediate_size", config.moe_intermediate_size, parallel);
  check_divides("shared_expert_intermediate_size", config.shared_expert_intermediate_size, parallel);
}

// Cuts tensors made of parts that lie one behind the other along a dimension, each divided evenly.
class Cutter {
 public:
  explicit Cutter(const ParallelConfig& parallel) : parallel_(parallel) {}

  TensorShard cut(int dim, std::initializer_list<std::int64_t> part_sizes) const {
    TensorShard shard{.dim = dim};
    std::int64_t first = 0;
    for (const std::int64_t part : part_sizes) {
      const std::int64_t share = part / parallel_.tensor_parallel_size, begin = first + share * parallel_.rank;
      shard.ranges.push_back({begin, begin + share});
      first += part;
    }
    return shard;
  }
  // The vocabulary need not divide: the last ranks may have a row less.
  TensorShard cut_unevenly(std::int64_t size) const {
    const auto bound = [&](std::int64_t rank) {
      return rank * (size / parallel_.tensor_parallel_size) +
             std::min<std::int64_t>(rank, size % parallel_.tensor_parallel_size);
    };
    return {.dim = 0, .ranges = {{bound(parallel_.rank), bound(parallel_.rank + 1)}}};
  }
  // Heads of which there may be fewer than ranks.
  TensorShard cut_heads(std::int64_t num_heads, std::int64_t head_size) const {
    if (num_heads >= parallel_.tensor_parallel_size) return cut(0, {num_heads * head_size});
    const std::int64_t head = parallel_.rank * num_heads / parallel_.tensor_parallel_size;
    return {.dim = 0, .ranges = {{head * head_size, (head + 1) * head_size}}};
  }

 private:
  ParallelConfig parallel_;
};

// A tensor's name is a pattern's: `*` is a part without a dot, `**` the rest.
bool fits(std::string_view name, std::string_view pattern) {
  while (!pattern.empty()) {
    if (pattern == "**") return true;
    if (pattern.front() == '*') {
      const std::size_t size = std::min(name.find('.'), name.size());
      if (size == 0) return false;
      name.remove_prefix(size);
    } else if (!name.empty() && name.front() == pattern.front()) {
      name.remove_prefix(1);
    } else {
      return false;
    }
    pattern.remove_prefix(1);
  }
  return name.empty();
}

using Config = const ModelConfig&;
using Cut = const Cutter&;
struct Rule {
  std::string_view pattern;
  TensorShard (*shard)(Config, Cut);
};

std::int64_t num_keys(Config c) { return std::int64_t{c.linear_num_key_heads} * c.linear_key_head_dim; }
std::int64_t num_values(Config c) { return std::int64_t{c.linear_num_value_heads} * c.linear_value_head_dim; }

TensorShard whole(Config /*config*/, Cut /*cut*/) { return {}; }
TensorShard vocabulary(Config c, Cut cut) { return cut.cut_unevenly(c.vocab_size); }
TensorShard query_rows(Config c, Cut cut) {
  return cut.cut(0, {std::int64_t{c.num_heads} * c.head_dim * (c.attention_output_gate ? 2 : 1)});
}
TensorShard key_value_rows(Config c, Cut cut) { return cut.cut_heads(c.num_kv_heads, c.head_dim); }
TensorShard query_columns(Config c, Cut cut) { return cut.cut(1, {std::int64_t{c.num_heads} * c.head_dim}); }
// Qwen3-Next's rows are groups by key head, so that a share is one range; Qwen3.5's are q, k and v one behind the
// other.
TensorShard qkvz_rows(Config c, Cut cut) { return cut.cut(0, {2 * num_keys(c) + 2 * num_values(c)}); }
TensorShard ba_rows(Config c, Cut cut) { return cut.cut(0, {2 * std::int64_t{c.linear_num_value_heads}}); }
TensorShard qkv_rows(Config c, Cut cut) { return cut.cut(0, {num_keys(c), num_keys(c), num_values(c)}); }
TensorShard value_rows(Config c, Cut cut) { return cut.cut(0, {num_values(c)}); }
TensorShard value_heads(Config c, Cut cut) { return cut.cut(0, {c.linear_num_value_heads}); }
TensorShard value_columns(Config c, Cut cut) { return cut.cut(1, {num_values(c)}); }
TensorShard mlp_rows(Config c, Cut cut) { return cut.cut(0, {c.intermediate_size}); }
TensorShard mlp_columns(Config c, Cut cut) { return cut.cut(1, {c.intermediate_size}); }
// Every rank has a slice of every expert.
TensorShard expert_rows(Config c, Cut cut) { return cut.cut(0, {c.moe_intermediate_size}); }
TensorShard expert_columns(Config c, Cut cut) { return cut.cut(1, {c.moe_intermediate_size}); }
TensorShard experts_rows(Config c, Cut cut) { return cut.cut(1, {c.moe_intermediate_size, c.moe_intermediate_size}); }
TensorShard experts_columns(Config c, Cut cut) { return cut.cut(2, {c.moe_intermediate_size}); }
TensorShard shared_expert_rows(Config c, Cut cut) { return cut.cut(0, {c.shared_expert_intermediate_size}); }
TensorShard shared_expert_columns(Config c, Cut cut) { return cut.cut(1, {c.shared_expert_intermediate_size}); }

// Layers of the draft module, "mtp.layers.0...", are cut as layers are.
constexpr Rule kRules[] = {
    // --8<-- [start:rules]
    {"embed_tokens.weight", vocabulary},
    {"lm_head.weight", vocabulary},
    {"norm.weight", whole},
    {"layers.*.input_layernorm.weight", whole},
    {"layers.*.post_attention_layernorm.weight", whole},
    // attention: whole heads; a bias of the sum is added once, by what adds up the ranks
    {"layers.*.self_attn.q_proj.*", query_rows},
    {"layers.*.self_attn.k_proj.*", key_value_rows},
    {"layers.*.self_attn.v_proj.*", key_value_rows},
    {"layers.*.self_attn.o_proj.weight", query_columns},
    {"layers.*.self_attn.o_proj.bias", whole},
    {"layers.*.self_attn.q_norm.weight", whole},
    {"layers.*.self_attn.k_norm.weight", whole},
    // Gated DeltaNet: key heads with their value heads
    {"layers.*.linear_attn.in_proj_qkvz.weight", qkvz_rows},
    {"layers.*.linear_attn.in_proj_ba.weight", ba_rows},
    {"layers.*.linear_attn.in_proj_qkv.weight", qkv_rows},
    {"layers.*.linear_attn.in_proj_z.weight", value_rows},
    {"layers.*.linear_attn.in_proj_b.weight", value_heads},
    {"layers.*.linear_attn.in_proj_a.weight", value_heads},
    {"layers.*.linear_attn.conv1d.weight", qkv_rows},
    {"layers.*.linear_attn.A_log", value_heads},
    {"layers.*.linear_attn.dt_bias", value_heads},
    {"layers.*.linear_attn.norm.weight", whole},
    {"layers.*.linear_attn.out_proj.weight", value_columns},
    // MLPs: a slice of each, and of every expert
    {"layers.*.mlp.gate_proj.weight", mlp_rows},
    {"layers.*.mlp.up_proj.weight", mlp_rows},
    {"layers.*.mlp.down_proj.weight", mlp_columns},
    {"layers.*.mlp.gate.weight", whole},
    {"layers.*.mlp.experts.*.gate_proj.weight", expert_rows},
    {"layers.*.mlp.experts.*.up_proj.weight", expert_rows},
    {"layers.*.mlp.experts.*.down_proj.weight", expert_columns},
    {"layers.*.mlp.experts.gate_up_proj", experts_rows},
    {"layers.*.mlp.experts.down_proj", experts_columns},
    {"layers.*.mlp.shared_expert.gate_proj.weight", shared_expert_rows},
    {"layers.*.mlp.shared_expert.up_proj.weight", shared_expert_rows},
    {"layers.*.mlp.shared_expert.down_proj.weight", shared_expert_columns},
    {"layers.*.mlp.shared_expert_gate.weight", whole},
    // the draft module: fc makes whole hidden states of whole hidden states
    {"mtp.fc.weight", whole},
    {"mtp.norm.weight", whole},
    {"mtp.pre_fc_norm_embedding.weight", whole},
    {"mtp.pre_fc_norm_hidden.weight", whole},
    // speech: around a talker's decoder, and the decoder of its codes
    {"codec_head.weight", vocabulary},
    {"codec_embedding.weight", whole},
    {"text_embedding.weight", whole},
    {"text_projection.**", whole},
    {"hidden_projection.**", whole},
    {"code_predictor.**", whole},
    {"code2wav.**", whole},
    {"decoder.**", whole},
    // --8<-- [end:rules]
};

template <class Function>
void for_each_rule(std::string_view name, const Function& use) {
  if (name.starts_with("mtp.layers.")) name.remove_prefix(std::string_view("mtp.").size());
  for (const Rule& rule : kRules)
    if (fits(name, rule.pattern)) use(rule);
}

}  // namespace

std::vector<std::string_view> sharding_rules_of(std::string_view name) {
  std::vector<std::string_view> patterns;
  for_each_rule(name, [&](const Rule& rule) { patterns.push_back(rule.pattern); });
  return patterns;
}

TensorShard shard_of(const ModelConfig& config, std::string_view name, const ParallelConfig& parallel) {
  check_parallel(config, parallel);
  const Rule* found = nullptr;
  for_each_rule(name, [&](const Rule& rule) { found = &rule; });
  DELTAIC_CHECK(found != nullptr, "no model has a tensor ", name);
  if (parallel.tensor_parallel_size == 1) return {};
  return found->shard(config, Cutter(parallel));
}

ModelConfig local_config(const ModelConfig& config, const ParallelConfig& parallel) {
  check_parallel(config, parallel);
  ModelConfig local = config;
  for (int* const size :
       {&local.num_heads, &local.linear_num_key_heads, &local.linear_num_value_heads, &local.intermediate_size,
        &local.moe_intermediate_size, &local.shared_expert_intermediate_size})
    *size /= parallel.tensor_parallel_size;
  if (config.num_kv_heads > 0) local.num_kv_heads = std::max(1, config.num_kv_heads / parallel.tensor_parallel_size);
  return local;
}

}  // namespace deltaic

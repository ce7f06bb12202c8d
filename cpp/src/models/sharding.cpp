#include "cpp/src/models/sharding.h"

#include <algorithm>
#include <array>

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

// Of tensors named layers.N.self_attn.X.
TensorShard attention_shard(const ModelConfig& config, std::string_view name, const Cutter& cutter) {
  const std::int64_t head_dim = config.head_dim, q_rows = config.attention_output_gate ? 2 * head_dim : head_dim;
  if (name.starts_with("q_proj.")) return cutter.cut(0, {config.num_heads * q_rows});
  if (name.starts_with("k_proj.") || name.starts_with("v_proj."))
    return cutter.cut_heads(config.num_kv_heads, head_dim);
  if (name == "o_proj.weight") return cutter.cut(1, {config.num_heads * head_dim});
  // A bias is added once: by what adds up the ranks, not by each of them.
  if (name == "o_proj.bias" || name == "q_norm.weight" || name == "k_norm.weight") return {};
  throw InvalidArgument(detail::concat("no attention layer has a tensor ", name));
}

// Of tensors named layers.N.linear_attn.X. Qwen3-Next's rows are groups by key head, so that a share is one range;
// Qwen3.5's are q, k and v one behind the other.
TensorShard gated_delta_net_shard(const ModelConfig& config, std::string_view name, const Cutter& cutter) {
  const std::int64_t keys = std::int64_t{config.linear_num_key_heads} * config.linear_key_head_dim;
  const std::int64_t heads = config.linear_num_value_heads, values = heads * config.linear_value_head_dim;
  if (name == "in_proj_qkvz.weight") return cutter.cut(0, {2 * keys + 2 * values});
  if (name == "in_proj_ba.weight") return cutter.cut(0, {2 * heads});
  if (name == "in_proj_qkv.weight" || name == "conv1d.weight") return cutter.cut(0, {keys, keys, values});
  if (name == "in_proj_z.weight") return cutter.cut(0, {values});
  if (name == "in_proj_b.weight" || name == "in_proj_a.weight" || name == "A_log" || name == "dt_bias")
    return cutter.cut(0, {heads});
  if (name == "out_proj.weight") return cutter.cut(1, {values});
  if (name == "norm.weight") return {};
  throw InvalidArgument(detail::concat("no Gated DeltaNet layer has a tensor ", name));
}

// Of tensors named layers.N.mlp.X. Every rank has a slice of every expert.
TensorShard feed_forward_shard(const ModelConfig& config, std::string_view name, const Cutter& cutter) {
  if (name == "gate.weight" || name == "shared_expert_gate.weight") return {};
  const std::int64_t expert_size = config.moe_intermediate_size;
  if (name == "experts.gate_up_proj") return cutter.cut(1, {expert_size, expert_size});
  if (name == "experts.down_proj") return cutter.cut(2, {expert_size});
  const std::int64_t size = name.starts_with("shared_expert.") ? config.shared_expert_intermediate_size
                            : name.starts_with("experts.")     ? expert_size
                                                               : config.intermediate_size;
  if (name.ends_with("gate_proj.weight") || name.ends_with("up_proj.weight")) return cutter.cut(0, {size});
  if (name.ends_with("down_proj.weight")) return cutter.cut(1, {size});
  throw InvalidArgument(detail::concat("no MLP has a tensor ", name));
}

}  // namespace

TensorShard shard_of(const ModelConfig& config, std::string_view name, const ParallelConfig& parallel) {
  check_parallel(config, parallel);
  if (parallel.tensor_parallel_size == 1) return {};
  const Cutter cutter(parallel);
  if (name == "embed_tokens.weight" || name == "lm_head.weight") return cutter.cut_unevenly(config.vocab_size);
  using Rule = TensorShard (*)(const ModelConfig&, std::string_view, const Cutter&);
  constexpr std::array<std::pair<std::string_view, Rule>, 3> kRules{{
      {".self_attn.", attention_shard},
      {".linear_attn.", gated_delta_net_shard},
      {".mlp.", feed_forward_shard},
  }};
  for (const auto& [part, rule] : kRules)
    if (const auto at = name.find(part); at != std::string_view::npos)
      return rule(config, name.substr(at + part.size()), cutter);
  // The draft module's fc makes whole hidden states of whole hidden states.
  if (name.ends_with("norm.weight") || name == "mtp.fc.weight" || name.starts_with("mtp.pre_fc_norm_")) return {};
  throw InvalidArgument(detail::concat("no model has a tensor ", name));
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

#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <deltaic/config.h>

namespace deltaic {

// How a model is divided for tensor parallelism. A rank runs whole heads, whole key-head groups and a slice of each
// MLP; what it computes of the residual stream is a partial sum after o_proj, out_proj and down_proj, and those sums
// are what ranks add up. Pure functions: nothing here reads a tensor.

// Rows (or columns, ...) [begin, end).
struct IndexRange {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};

// What a rank has of a tensor: these ranges of dimension `dim`, one behind the other. No range: all of it.
struct TensorShard {
  int dim = 0;
  std::vector<IndexRange> ranges{};
  bool is_replicated() const { return ranges.empty(); }
};

// The patterns of the table of rules that `name` fits: exactly one for each tensor that a loader reads. `*` stands for
// a part without a dot, `**` at the end for all that follows.
std::vector<std::string_view> sharding_rules_of(std::string_view name);

// `name`: of a checkpoint, without its prefix ("layers.3.self_attn.q_proj.weight"). Vectors of a hidden size, per-head
// norms and the router are on each rank; K and V heads are repeated where there are fewer of them than ranks. Of a
// model that speaks the talker's decoder is cut as any other (its head is called codec_head); what surrounds it is
// whole on each rank. Throws InvalidArgument for a rank outside the size, for a tensor that no model has, and, naming
// field and numbers, for a size that does not divide the model (sizes that are powers of two divide all published
// ones).
TensorShard shard_of(const ModelConfig& config, std::string_view name, const ParallelConfig& parallel);

// The model as a rank sees it: fewer heads, smaller MLPs, the same hidden size. Its tensors have the shapes that
// shard_of cuts. Throws as shard_of does.
ModelConfig local_config(const ModelConfig& config, const ParallelConfig& parallel);

}  // namespace deltaic

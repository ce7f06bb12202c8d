#include "cpp/src/models/gdn_projections.h"

namespace deltaic {

// A row: a group a key head of [q | k | v of its value heads | z of them], then a group a key head of [b | a].
void read_qwen3_next_projections(WeightReader& reader, const std::string& prefix, std::int64_t hidden_size,
                                 GatedDeltaNet& layer) {
  const std::int64_t key_dim = layer.shape.key_head_dim, num_key_heads = layer.shape.num_key_heads;
  const std::int64_t per_group = layer.shape.heads_per_group();
  const std::int64_t values_per_group = per_group * layer.shape.value_head_dim;
  const std::int64_t group = 2 * key_dim + 2 * values_per_group;
  const std::int64_t ba = num_key_heads * group;
  layer.in_proj = reader.projection({{prefix + "in_proj_qkvz.weight", ba},
                                     {prefix + "in_proj_ba.weight", std::int64_t{2} * layer.shape.num_value_heads}},
                                    hidden_size);
  layer.layout = {.q = 0,
                  .q_stride = group,
                  .k = key_dim,
                  .k_stride = group,
                  .v = 2 * key_dim,
                  .v_group_stride = group,
                  .z = 2 * key_dim + values_per_group,
                  .z_group_stride = group,
                  .b = ba,
                  .b_group_stride = 2 * per_group,
                  .a = ba + per_group,
                  .a_group_stride = 2 * per_group};
}

}  // namespace deltaic

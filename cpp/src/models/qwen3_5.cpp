#include "cpp/src/models/gdn_projections.h"

namespace deltaic {

// A row: [q | k | v | z | b | a], each with its heads in order.
void read_qwen3_5_projections(WeightReader& reader, const std::string& prefix, std::int64_t hidden_size,
                              GatedDeltaNet& layer) {
  const std::int64_t key_dim = layer.shape.key_head_dim, value_dim = layer.shape.value_head_dim;
  const std::int64_t num_key_heads = layer.shape.num_key_heads, num_value_heads = layer.shape.num_value_heads;
  const std::int64_t per_group = layer.shape.heads_per_group();
  const std::int64_t z = layer.shape.conv_dim(), b = z + num_value_heads * value_dim, a = b + num_value_heads;
  layer.in_proj = reader.projection({{prefix + "in_proj_qkv.weight", z},
                                     {prefix + "in_proj_z.weight", b - z},
                                     {prefix + "in_proj_b.weight", a - b},
                                     {prefix + "in_proj_a.weight", num_value_heads}},
                                    hidden_size);
  layer.layout = {.q = 0,
                  .q_stride = key_dim,
                  .k = num_key_heads * key_dim,
                  .k_stride = key_dim,
                  .v = 2 * num_key_heads * key_dim,
                  .v_group_stride = per_group * value_dim,
                  .z = z,
                  .z_group_stride = per_group * value_dim,
                  .b = b,
                  .b_group_stride = per_group,
                  .a = a,
                  .a_group_stride = per_group};
}

}  // namespace deltaic

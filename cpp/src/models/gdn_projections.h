#pragma once

#include <string>

#include "cpp/src/layers/gated_delta_net.h"
#include "cpp/src/models/weight_reader.h"

namespace deltaic {

// The input projections of a GDN layer, as each family names and orders them (docs/models.md, "GDN projections").
// `prefix` ends in "linear_attn."; layer.shape is set. They set layer.in_proj and layer.layout; no weight is permuted.

// qwen3_5.cpp: in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, heads in order.
void read_qwen3_5_projections(WeightReader& reader, const std::string& prefix, std::int64_t hidden_size,
                              GatedDeltaNet& layer);
// qwen3_next.cpp: in_proj_qkvz and in_proj_ba, rows in groups by key head.
void read_qwen3_next_projections(WeightReader& reader, const std::string& prefix, std::int64_t hidden_size,
                                 GatedDeltaNet& layer);

}  // namespace deltaic

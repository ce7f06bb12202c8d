#pragma once

#include <deltaic/config.h>

#include "cpp/src/loader/json_fields.h"

namespace deltaic {

// Reads the rotary embedding of a text config into model.rope and model.rotary_dim (docs/models.md, "Configuration" and
// "Rotary embedding"): a value inside rope_parameters or rope_scaling wins over the top-level key, and that over the
// default. Needs architecture, head_dim and max_position_embeddings.
void read_rope_config(const JsonFields& text, double default_partial_rotary_factor, ModelConfig& model);

}  // namespace deltaic

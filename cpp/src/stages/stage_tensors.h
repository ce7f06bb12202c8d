#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "cpp/src/core/buffer.h"
#include "cpp/src/loader/safetensors.h"
#include "cpp/src/ops/context.h"
#include "cpp/src/ops/linear.h"
#include "cpp/src/ops/weight.h"

namespace deltaic {

// All tensors of a checkpoint folder, or of one safetensors file, under their stored names. Throws as the readers of
// safetensors.h do.
StoredTensors open_stage_tensors(const std::filesystem::path& path);

// The tensors whose names start with `prefix`, without it. Throws InvalidArgument when there are none.
StoredTensors part_of(const StoredTensors& tensors, std::string_view prefix);

// The decoder of a stage, under the names of a text model: the talker calls its embedding and its head otherwise, and
// a code predictor has one of each a codebook, of which `embedding` and `head` are aliases to satisfy the names.
StoredTensors as_text_model(const StoredTensors& part, const std::string& embedding, const std::string& head);

// y = x W^T + b, as a checkpoint stores it: "NAME.weight" and, where it has one, "NAME.bias".
struct StageLinear {
  ops::Weight weight;
  Tensor bias;  // f32; without memory: none

  void forward(const ops::Context& ctx, TensorView x, TensorView y, bool accumulate = false) const {
    ops::linear(ctx, x, weight, {.bias = bias.view(), .accumulate = accumulate}, y);
  }
};

}  // namespace deltaic

#include "cpp/src/layers/projection.h"

#include <utility>

#include "cpp/src/layers/workspace.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

void Projection::add(ops::Weight weight) {
  const std::int64_t num_columns = weight.out_features();
  parts.push_back({.weight = std::move(weight), .first_column = row_size});
  row_size += num_columns;
}

const ops::Weight* Projection::fusing_weight(const ops::Context& ctx, const LayerInput& input) const {
  return parts.size() == 1 && ops::linear_fuses(ctx, input.x(), parts[0].weight) ? &parts[0].weight : nullptr;
}

void Projection::forward(const ops::Context& ctx, LayerInput& input, TensorView y) const {
  if (const ops::Weight* weight = fusing_weight(ctx, input); weight != nullptr && !input.is_normed())
    return ops::linear(ctx, input.x(), *weight, {.bias = bias.view(), .norm = input.norm()}, y);
  for (const Part& part : parts) {
    const std::int64_t end = part.first_column + part.weight.out_features();
    ops::LinearOptions options;
    if (bias.view().data != nullptr) options.bias = bias.view().slice(part.first_column, end);
    ops::linear(ctx, input.normed(ctx), part.weight, options,
                columns(y, part.first_column, part.weight.out_features()));
  }
}

}  // namespace deltaic

#pragma once

#include "cpp/src/ops/context.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic {

// What a layer reads: rms_norm of the residual stream. Kernels that norm for themselves read x; for others normed()
// runs the norm, once.
class LayerInput {
 public:
  //   x       [num_tokens, hidden_size]
  //   buffer  like x, where the norm is stored if it runs
  LayerInput(TensorView x, ops::FusedNorm norm, TensorView buffer) : x_(x), norm_(norm), buffer_(buffer) {}

  const TensorView& x() const { return x_; }
  const ops::FusedNorm& norm() const { return norm_; }
  bool is_normed() const { return is_normed_; }
  const TensorView& normed(const ops::Context& ctx) {
    if (!is_normed_) ops::rms_norm(ctx, x_, norm_.weight, norm_.eps, buffer_);
    is_normed_ = true;
    return buffer_;
  }

 private:
  TensorView x_;
  ops::FusedNorm norm_;
  TensorView buffer_;
  bool is_normed_ = false;
};

}  // namespace deltaic

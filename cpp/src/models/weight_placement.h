#pragma once

#include <deltaic/tensor.h>

namespace deltaic {

// Where weights go and as what.
struct WeightPlacement {
  Device device{};
  // Of matrices: on CUDA, where it is that of activations too, and of dummy weights. On the CPU matrices stay as
  // stored.
  DType dtype = DType::bf16;
};

}  // namespace deltaic

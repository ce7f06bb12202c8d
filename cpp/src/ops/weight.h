#pragma once

#include <memory>

#include <deltaic/tensor.h>

namespace deltaic::ops {

// A matrix of a checkpoint, as its backend keeps it: y = x W^T with W [out_features, in_features], in f32, f16 or
// bf16. On the CPU it is a view of the mapped file; on CUDA it has been uploaded. Only ops know the layout.
struct Weight {
  TensorView view;
  std::shared_ptr<const void> owner;  // keeps the memory alive; null when the caller does

  bool is_set() const { return view.data != nullptr; }
  std::int64_t out_features() const { return view.shape[0]; }
  std::int64_t in_features() const { return view.shape[1]; }
};

}  // namespace deltaic::ops

#pragma once

#include <array>
#include <cstdint>

#include <deltaic/tensor.h>

#include "python/bindings/module.h"

// A strided array of another library: one with __array_interface__ (NumPy), __dlpack__ (PyTorch, CuPy, JAX) or
// __cuda_array_interface__. It owns nothing; the object must outlive it.
struct Array {
  std::uint64_t address = 0;  // of the first element
  char kind = 0;              // i, u, f or another letter, as in NumPy's type strings
  int elem_size = 0;          // bytes
  int rank = 0;
  std::array<std::int64_t, deltaic::kMaxRank> shape{}, stride{};  // in elements
  deltaic::Device device{};

  // A view for the core. `dtype` must have the right size.
  deltaic::TensorView view(deltaic::DType dtype) const;
};

// Nothing is copied and no stream is waited for. Throws InvalidArgument naming `what` for anything else than an array
// of at most kMaxRank dimensions on the CPU or a CUDA device.
Array read_array(py::handle object, const char* what);

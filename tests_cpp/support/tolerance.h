#pragma once

#include <cmath>
#include <cstdint>

#include <deltaic/tensor.h>

namespace deltaic::test {

// Half a unit in the last place, relative.
inline double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

// The largest relative error (see max_error) of a result that is kept in `dtype` and sums `num_terms` products in f32:
// the result's own rounding, and roundings that add up like a random walk, with a factor of 4 for the tail.
inline double tolerance(DType dtype, std::int64_t num_terms) {
  const double own = dtype == DType::f32 ? 0.0 : unit_roundoff(dtype);
  return own + 4.0 * unit_roundoff(DType::f32) * std::sqrt(static_cast<double>(num_terms) + 4.0);
}

}  // namespace deltaic::test

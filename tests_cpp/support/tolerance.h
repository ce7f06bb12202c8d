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

// The largest error of a sum of num_terms products of root mean square `term` that is kept in f32 and made term by term
// (sums in lanes or blocks stay below). After j products the sum is about term * sqrt(j), and each addition rounds it
// by up to u = half a unit in the last place, evenly: the variance is u^2 / 3 * term^2 * num_terms^2 / 2. Four
// deviations.
inline double ordered_sum_tolerance(std::int64_t num_terms, double term) {
  return 4.0 * unit_roundoff(DType::f32) * term * static_cast<double>(num_terms) / std::sqrt(6.0);
}

// The same for tensor cores: every product of 16 terms cuts its sum off, by up to 2u of term * sqrt(num_terms).
inline double tensor_sum_tolerance(std::int64_t num_terms, double term) {
  const auto n = static_cast<double>(num_terms);
  return 2.0 * unit_roundoff(DType::f32) * n / 16.0 * term * std::sqrt(n);
}

}  // namespace deltaic::test

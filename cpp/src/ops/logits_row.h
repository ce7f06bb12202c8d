#pragma once

#include <cstdint>
#include <span>

namespace deltaic::ops {

// Passes over one row of logits. None of them allocates.

// The largest element. `is_finite` is false where the row has a NaN or +inf, or nothing but -inf.
struct RowMax {
  float value = 0;
  bool is_finite = false;
};
RowMax row_max(std::span<const float> logits);

// The first index that holds `value`. It must be there.
std::int32_t first_index_of(std::span<const float> logits, float value);

// How many elements are > `value`.
std::int64_t count_above(std::span<const float> logits, float value);

// Sum of exp((logit - max) * scale) over the elements >= lowest, each term good to about 1e-7. `max` is finite and no
// element is larger, scale > 0; -inf counts 0.
double sum_exp(std::span<const float> logits, float max, float scale, float lowest);

}  // namespace deltaic::ops

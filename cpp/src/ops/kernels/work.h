#pragma once

#include <algorithm>
#include <cstdint>

namespace deltaic::cpu {

// Elements of simple work (a load, some arithmetic, a store) that are worth waking another thread for.
inline constexpr std::int64_t kElementsPerTask = 8192;

// Rows a task when each costs `elements` of simple work.
inline std::int64_t grain_of(std::int64_t elements) {
  return std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(elements, 1));
}

}  // namespace deltaic::cpu

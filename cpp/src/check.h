#pragma once

#include <sstream>
#include <string>

#include <deltaic/error.h>

namespace deltaic::detail {

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

}  // namespace deltaic::detail

// For what a caller can get wrong. The message is for the user: name the field and the numbers.
#define DELTAIC_CHECK(condition, ...)                                           \
  do {                                                                          \
    if (!(condition)) [[unlikely]]                                              \
      throw ::deltaic::InvalidArgument(::deltaic::detail::concat(__VA_ARGS__)); \
  } while (false)

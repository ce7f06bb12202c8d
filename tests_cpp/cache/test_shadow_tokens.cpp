#include <array>
#include <cstdint>
#include <type_traits>

#include <doctest/doctest.h>

#include "cpp/src/cache/shadow_tokens.h"

using deltaic::cache::ShadowTokens;

#ifdef NDEBUG
TEST_CASE("a release build keeps no shadow") {
  CHECK(std::is_empty_v<ShadowTokens>);
  CHECK(ShadowTokens(4).holds(2, 64));
}
#else
TEST_CASE("a shadow knows how many tokens an item holds, and which came last") {
  ShadowTokens shadow(4);
  const std::array<std::int32_t, 2> last{7, 8}, other{7, 9};
  CHECK_FALSE(shadow.holds(2, 0));  // unknown
  shadow.set(2, 64, last);
  CHECK(shadow.holds(2, 64, last));
  CHECK_FALSE(shadow.holds(2, 48, last));  // the wrong count
  CHECK_FALSE(shadow.holds(2, 64, other));
  CHECK_FALSE(shadow.holds(1, 64, last));
  shadow.set(2, 80);
  CHECK(shadow.holds(2, 80));
  shadow.clear(2);
  CHECK_FALSE(shadow.holds(2, 80));
  CHECK_THROWS(shadow.holds(4, 0));
}
#endif

#pragma once

#include <string>

namespace deltaic::test {

// "r7". Appended, not added: GCC 12 warns wrongly of `"r" + std::to_string(7)` where it inlines all of it.
inline std::string numbered(std::string name, int number) { return name.append(std::to_string(number)); }

}  // namespace deltaic::test

#pragma once

// The version of deltaic, written once: CMake and pyproject.toml read it from here.
#define DELTAIC_VERSION "0.1.0"

namespace deltaic {

// The version of the library that was linked, which may differ from the header's.
const char* version() noexcept;

}  // namespace deltaic

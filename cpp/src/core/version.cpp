#include <deltaic/version.h>

namespace deltaic {

const char* version() noexcept { return DELTAIC_VERSION; }

}  // namespace deltaic

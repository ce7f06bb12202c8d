// Every CUDA entry point of a build without CUDA: a clear Unsupported. Compiled instead of cuda/.
#include "cpp/src/check.h"

namespace deltaic {}

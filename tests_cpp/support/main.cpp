#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

// Tests ask for more memory than there is; AddressSanitizer then has to fail as the system does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include "tests_cpp/support/test_device.h"

// Tests ask for more memory than there is; AddressSanitizer then has to fail as the system does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

int main(int argc, char** argv) {
  if (deltaic::test::test_device().type == deltaic::DeviceType::cuda && deltaic::num_cuda_devices() == 0) {
    std::puts("skipped: DELTAIC_TEST_DEVICE is cuda, and this build or machine has no CUDA device");
    return 0;
  }
  return doctest::Context(argc, argv).run();
}

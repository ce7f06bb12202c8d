#include <doctest/doctest.h>

#include "cpp/src/ops/ceilings.h"
#include "tests_cpp/support/on_device.h"

namespace deltaic {
namespace {

TEST_CASE("the ceilings of a GPU are those of no slow and no impossible one") {
  if (!test::has_gpu()) return;
  const double bandwidth = cuda::measure_read_bandwidth(0), peak = cuda::measure_matrix_peak(0);
  MESSAGE("read ", bandwidth, " GB/s, bf16 products ", peak / 1e3, " TFLOP/s");
  CHECK(bandwidth > 100);  // a laptop's
  CHECK(bandwidth < 20e3);
  CHECK(peak > 10e3);
  CHECK(peak < 5e6);
}

}  // namespace
}  // namespace deltaic

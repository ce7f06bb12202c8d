#include <utility>

#include <pybind11/stl.h>

#include "cpp/src/ops/ceilings.h"
#include "python/bindings/module.h"

using namespace deltaic;

void bind_ceilings(py::module_& m) {
  m.def(
      "measure_cpu_ceilings",
      [](int num_threads) {
        py::gil_scoped_release unlocked;
        ThreadPool threads(num_threads);
        return std::pair(1e9 * cpu::measure_read_bandwidth(threads), 1e9 * cpu::measure_fma_peak(threads));
      },
      py::arg("num_threads") = 0,
      "Bytes a second that this process can read, and f32 operations a second; takes seconds and 512 MiB.");
  m.def(
      "measure_gpu_ceilings",
      [](int device_index) {
        py::gil_scoped_release unlocked;
        return std::pair(1e9 * cuda::measure_read_bandwidth(device_index),
                         1e9 * cuda::measure_matrix_peak(device_index));
      },
      py::arg("device_index"),
      "Bytes a second that a GPU can read, and bf16 operations a second; takes about 1 GiB of its memory.");
}

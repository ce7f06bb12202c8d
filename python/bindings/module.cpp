#include <deltaic/error.h>
#include <deltaic/version.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of deltaic.";
  m.attr("__version__") = deltaic::version();
}

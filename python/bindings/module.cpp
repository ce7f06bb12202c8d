#include "python/bindings/module.h"

#include <deltaic/error.h>
#include <deltaic/version.h>

namespace {

// Under the name that C++ throws, each also the Python exception that a caller would expect.
void bind_errors(py::module_& m) {
  static py::handle error = py::register_exception<deltaic::Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<deltaic::InvalidArgument>(m, "InvalidArgument",
                                                   py::make_tuple(error, py::handle(PyExc_ValueError)));
  py::register_exception<deltaic::Unsupported>(m, "Unsupported",
                                               py::make_tuple(error, py::handle(PyExc_NotImplementedError)));
  py::register_exception<deltaic::OutOfMemory>(m, "OutOfMemory", py::make_tuple(error, py::handle(PyExc_MemoryError)));
  py::register_exception<deltaic::DeviceError>(m, "DeviceError", error);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native core of deltaic.";
  m.attr("__version__") = deltaic::version();
  bind_errors(m);
  bind_ceilings(m);
  bind_tensor(m);
  bind_config(m);
  bind_scheduler_output(m);
  bind_cache(m);
  bind_input_batch(m);
  bind_step_hook(m);
  bind_runner(m);
  bind_stage_edge(m);
  bind_stages(m);
  bind_mamba(m);
}

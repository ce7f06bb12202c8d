#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

// One a file. They convert and call; what has a meaning is decided in the core or in Python.
void bind_ceilings(py::module_& m);
void bind_tensor(py::module_& m);
void bind_config(py::module_& m);
void bind_scheduler_output(py::module_& m);
void bind_cache(py::module_& m);
void bind_input_batch(py::module_& m);
void bind_mamba(py::module_& m);
void bind_runner(py::module_& m);
void bind_stage_edge(py::module_& m);
void bind_stages(py::module_& m);
void bind_step_hook(py::module_& m);

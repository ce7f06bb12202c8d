#include <deltaic/step_hook.h>
#include <pybind11/stl.h>

#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

void bind_row_plan(py::module_& m) {
  Struct<StepRow>(m, "StepRow", "One request of a step and its place on the token axis.")
      .field("req_id", &StepRow::req_id)
      .field("first_token", &StepRow::first_token)
      .field("num_tokens", &StepRow::num_tokens)
      .field("num_prompt_tokens", &StepRow::num_prompt_tokens)
      .field("num_computed_tokens", &StepRow::num_computed_tokens)
      .class_object()
      .def_property_readonly("is_prefill", &StepRow::is_prefill)
      .def_property_readonly("seq_len", &StepRow::seq_len);
  py::class_<RowRun>(m, "RowRun", "Neighbouring rows that one call of a preprocessing hook takes.")
      .def_readonly("first_row", &RowRun::first_row)
      .def_readonly("num_rows", &RowRun::num_rows)
      .def_readonly("is_batched", &RowRun::is_batched);
  py::class_<RowPlan>(m, "RowPlan", "What a step does with its rows.")
      .def_readonly("runs", &RowPlan::runs)
      .def_readonly("predictor_rows", &RowPlan::predictor_rows);
  m.def(
      "plan_rows",
      [](const std::vector<StepRow>& rows, int num_step_tokens, bool has_batched_hook, bool has_predictor) {
        return plan_rows(rows, num_step_tokens, {.has_batched_hook = has_batched_hook, .has_predictor = has_predictor});
      },
      py::arg("rows"), py::arg("num_step_tokens"), py::kw_only(), py::arg("has_batched_hook") = false,
      py::arg("has_predictor") = false,
      "Group the rows of a step for its hooks. RuntimeError for tokens with a gap or out of range.");
}

}  // namespace

void bind_stages(py::module_& m) { bind_row_plan(m); }

#include <deltaic/error.h>
#include <deltaic/step_hook.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "cpp/src/stages/stage_runner.h"
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

// Lets a Python class be a hook: one call a step, with arrays that share the runner's memory.
class PyStepHook : public StepHook, public py::trampoline_self_life_support {
 public:
  bool fills_embeddings() const override { PYBIND11_OVERRIDE(bool, StepHook, fills_embeddings); }
  int hidden_layer() const override { PYBIND11_OVERRIDE(int, StepHook, hidden_layer); }
  void before_forward(const StepView& step) override { PYBIND11_OVERRIDE(void, StepHook, before_forward, step); }
  void after_forward(const StepView& step) override { PYBIND11_OVERRIDE(void, StepHook, after_forward, step); }
  void after_sample(const StepView& step, std::span<const std::int32_t> token_ids) override {
    const std::vector<std::int32_t> ids(token_ids.begin(), token_ids.end());
    PYBIND11_OVERRIDE(void, StepHook, after_sample, step, ids);
  }
};

// An array over the view's memory, which the runner owns; None without memory.
template <class T>
py::object share(const TensorView& view) {
  if (view.data == nullptr) return py::none();
  const std::vector<py::ssize_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
  return py::array_t<T>(shape, view.as<T>(), py::capsule(view.data, [](void*) {}));
}

void bind_hooks(py::module_& m) {
  py::class_<StepView>(m, "StepView", "A step as a hook sees it; the arrays are valid during the call alone.")
      .def_property_readonly(
          "rows", [](const StepView& self) { return std::vector<StepRow>(self.rows.begin(), self.rows.end()); })
      .def_property_readonly("input_ids", [](const StepView& self) { return share<std::int32_t>(self.input_ids); })
      .def_property_readonly("positions", [](const StepView& self) { return share<std::int64_t>(self.positions); })
      .def_property_readonly("inputs_embeds", [](const StepView& self) { return share<float>(self.inputs_embeds); })
      .def_property_readonly("hidden", [](const StepView& self) { return share<float>(self.hidden); })
      .def_property_readonly("layer_hidden", [](const StepView& self) { return share<float>(self.layer_hidden); });
  py::class_<StepHook, PyStepHook, py::smart_holder>(m, "StepHook", "Is called around each forward of a ModelRunner.")
      .def(py::init<>())
      .def("fills_embeddings", &StepHook::fills_embeddings)
      .def("hidden_layer", &StepHook::hidden_layer)
      .def("before_forward", &StepHook::before_forward, py::arg("step"))
      .def("after_forward", &StepHook::after_forward, py::arg("step"))
      .def(
          "after_sample",
          [](StepHook& self, const StepView& step, const std::vector<std::int32_t>& token_ids) {
            self.after_sample(step, token_ids);
          },
          py::arg("step"), py::arg("token_ids"));
}

// Lets a Python class be a stage: a call for each run of rows, with arrays that share the staging memory.
class PyStageRunner : public StageRunner, public py::trampoline_self_life_support {
 public:
  using StageRunner::StageRunner;

  int hidden_layer() const override { PYBIND11_OVERRIDE(int, StageRunner, hidden_layer); }
  bool has_batched_hook() const override { PYBIND11_OVERRIDE(bool, StageRunner, has_batched_hook); }
  bool has_predictor() const override { PYBIND11_OVERRIDE(bool, StageRunner, has_predictor); }
  std::optional<std::string> preprocess(std::span<const StepRow> rows, bool is_batched, TensorView ids,
                                        TensorView embeds) override {
    const py::gil_scoped_acquire locked;
    const py::function hook = py::get_override(static_cast<const StageRunner*>(this), "preprocess_rows");
    if (!hook) throw Error("a stage implements preprocess_rows");
    return hook(std::vector<StepRow>(rows.begin(), rows.end()), is_batched, share<std::int32_t>(ids),
                share<float>(embeds))
        .cast<std::optional<std::string>>();
  }
  void predict(std::span<const StepRow> rows, TensorView embeds) override {
    const py::gil_scoped_acquire locked;
    const py::function hook = py::get_override(static_cast<const StageRunner*>(this), "predict_rows");
    if (!hook) throw Error("a stage with a predictor implements predict_rows");
    hook(std::vector<StepRow>(rows.begin(), rows.end()), share<float>(embeds));
  }
  void commit(std::span<const StepRow> rows) override {
    const std::vector<StepRow> given(rows.begin(), rows.end());
    PYBIND11_OVERRIDE_NAME(void, StageRunner, "commit_rows", commit, given);
  }
  void before_forward(const StepView& step) override { PYBIND11_OVERRIDE(void, StageRunner, before_forward, step); }
  void begin_step(const StepView& step) override { PYBIND11_OVERRIDE(void, StageRunner, begin_step, step); }
  void after_forward(const StepView& step) override { PYBIND11_OVERRIDE(void, StageRunner, after_forward, step); }
};

void bind_stage_runner(py::module_& m) {
  py::class_<StageRunner, StepHook, PyStageRunner, py::smart_holder>(
      m, "StageRunner",
      "Runs the hooks of one stage over the rows of a step: plan, validate, commit. A Python class implements "
      "preprocess_rows(rows, is_batched, ids, embeds), which fills its arrays or returns why the rows are refused, and "
      "may implement has_batched_hook, has_predictor, predict_rows(rows, embeds), commit_rows(rows), begin_step and "
      "after_forward.")
      .def(py::init<int, int>(), py::arg("hidden_size"), py::arg("max_num_tokens"))
      .def(
          "prepare",
          [](StageRunner& self, const std::vector<StepRow>& rows,
             const py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>& ids) {
            return self.prepare(rows, make_view(const_cast<std::int32_t*>(ids.data()), DType::i32,
                                                {static_cast<std::int64_t>(ids.size())}));
          },
          py::arg("rows"), py::arg("ids"), "Fill the ids and embeddings of a step's tokens; return the plan.")
      .def_property_readonly("ids", [](const StageRunner& self) { return share<std::int32_t>(self.ids()); })
      .def_property_readonly("embeds", [](const StageRunner& self) { return share<float>(self.embeds()); })
      .def("take_failures", &StageRunner::take_failures, "Return the requests that failed since the last call.")
      .def("has_batched_hook", &StageRunner::has_batched_hook)
      .def("has_predictor", &StageRunner::has_predictor);
}

}  // namespace

void bind_step_hook(py::module_& m) {
  bind_row_plan(m);
  bind_hooks(m);
  bind_stage_runner(m);
}

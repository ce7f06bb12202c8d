#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "cpp/src/check.h"
#include "cpp/src/stages/stage_edge.h"
#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

// A Python object that C++ holds and lets go of from any thread.
std::shared_ptr<void> hold(py::object object) {
  return {object.release().ptr(), [](void* held) {
            const py::gil_scoped_acquire locked;
            Py_DECREF(static_cast<PyObject*>(held));
          }};
}
py::object held_by(const std::shared_ptr<void>& value) {
  if (value == nullptr) return py::none();
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(value.get()));
}

constexpr std::pair<DType, const char*> kNumpyTypes[] = {
    {DType::f32, "float32"}, {DType::f64, "float64"}, {DType::f16, "float16"}, {DType::i8, "int8"},
    {DType::i32, "int32"},   {DType::i64, "int64"},   {DType::u8, "uint8"}};

py::dtype numpy_type(DType dtype) {
  for (const auto& [known, name] : kNumpyTypes)
    if (known == dtype) return py::dtype(name);
  throw Unsupported(detail::concat("no array holds ", name(dtype)));
}

DType core_type(const py::dtype& dtype, const PayloadKey& key) {
  for (const auto& [known, name] : kNumpyTypes)
    if (py::dtype(name).equal(dtype)) return known;
  throw InvalidArgument(detail::concat("rows of ", key.first, ".", key.second, " are of type ",
                                       std::string(py::str(static_cast<const py::object&>(dtype)))));
}

bool put(StageEdge& edge, const std::string& id, const PayloadKey& key, const py::array& rows, std::int64_t begin) {
  const py::array dense = py::array::ensure(rows, py::array::c_style);
  const std::vector<std::int64_t> shape(dense.shape(), dense.shape() + dense.ndim());
  return edge.put(id, key, make_view(const_cast<void*>(dense.data()), core_type(dense.dtype(), key), shape), begin);
}

py::array array_of(const EdgeRows& rows) {
  std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(rows.count)};
  shape.insert(shape.end(), rows.row_shape.begin(), rows.row_shape.end());
  return py::array(numpy_type(rows.dtype), shape, rows.bytes.data());
}

// section -> {name: value}
using Section = py::typing::Dict<py::str, py::object>;
py::typing::Dict<py::str, Section> payload_of(const Delivery& delivery) {
  py::typing::Dict<py::str, Section> payload;
  const auto section = [&](const PayloadKey& key) -> py::dict {
    const py::str name(key.first);
    if (!payload.contains(name)) payload[name] = py::dict();
    return payload[name];
  };
  for (const auto& [key, rows] : delivery.rows) section(key)[py::str(key.second)] = array_of(rows);
  for (const auto& [key, value] : delivery.latest) section(key)[py::str(key.second)] = held_by(value);
  return payload;
}

}  // namespace

void bind_stage_edge(py::module_& m) {
  py::enum_<EndStatus>(m, "EndStatus", "How a request on an edge ended.")
      .value("ok", EndStatus::ok)
      .value("error", EndStatus::error)
      .value("cancelled", EndStatus::cancelled);
  Struct<EdgeMode>(m, "EdgeMode", "How an edge hands over.")
      .field("is_full", &EdgeMode::is_full)
      .field("first", &EdgeMode::first)
      .field("size", &EdgeMode::size)
      .field("left_context", &EdgeMode::left_context);
  py::class_<Delivery>(m, "Delivery", "What is due of a request: a payload, or its end.")
      .def_readonly("id", &Delivery::id, "Whose it is: REQUEST/GENERATION.")
      .def_property_readonly("payload", &payload_of, "Section to name to rows [n, ...] or to the latest value.")
      .def(
          "rows", [](const Delivery& self, const PayloadKey& key) { return array_of(self.rows.at(key)); },
          py::arg("key"), "Rows of one key.")
      .def_property_readonly(
          "request", [](const Delivery& self) { return held_by(self.request); },
          "The latest object of set_request; None without one.")
      .def_readonly("num_left", &Delivery::num_left, "Rows in front of each key that were given before.")
      .def_property_readonly(
          "status",
          [](const Delivery& self) -> std::optional<EndStatus> {
            if (!self.end) return std::nullopt;
            return self.end->status;
          },
          "How the request ended; None while it goes on.")
      .def_property_readonly(
          "error", [](const Delivery& self) { return self.end ? self.end->error : std::string(); },
          "Why it ended with an error; else empty.");
  py::class_<StageEdge, py::smart_holder>(
      m, "StageEdge",
      "The one way from a stage to the next: of each request its rows in order, and then exactly one end. Ids are "
      "REQUEST/GENERATION; what comes for a generation that has not begun is parked, for a dead one it is dropped.")
      .def(
          py::init([](const EdgeMode& mode, std::string name, std::vector<PayloadKey> keys,
                      std::vector<PayloadKey> replace_keys, std::int64_t capacity, std::optional<double> deadline_s) {
            return std::make_unique<StageEdge>(mode, EdgeOptions{.name = std::move(name),
                                                                 .keys = std::move(keys),
                                                                 .replace_keys = std::move(replace_keys),
                                                                 .capacity = capacity,
                                                                 .deadline_s = deadline_s});
          }),
          py::arg("mode"), py::kw_only(), py::arg("name") = "", py::arg("keys"),
          py::arg("replace_keys") = std::vector<PayloadKey>(), py::arg("capacity") = EdgeOptions{}.capacity,
          py::arg("deadline_s") = py::none(),
          "At most `capacity` rows of a request may wait. A request for which nothing new comes for deadline_s seconds "
          "ends in an error. Raises InvalidArgument naming the field.")
      .def_property_readonly(
          "mode", [](const StageEdge& self) { return self.mode(); }, "How the edge hands over.")
      .def("carries", &StageEdge::carries, py::arg("key"), "Whether the edge passes a key on.")
      .def("replaces", &StageEdge::replaces, py::arg("key"), "Whether of a key the latest value counts, not all rows.")
      .def("advance", &StageEdge::advance, py::arg("now"), "Say what time it is, in seconds.")
      .def("open", &StageEdge::open, py::arg("id"), py::arg("num_prompt_rows") = 0,
           "Begin a request; what was parked for it is there, an older generation is cancelled. The first chunk has "
           "num_prompt_rows more rows. Raises InvalidArgument for a generation that has begun or ended.")
      .def("is_open", &StageEdge::is_open, py::arg("id"), "Whether a request has begun and was not closed.")
      .def("close", &StageEdge::close, py::arg("id"), "Cancel a request; what still comes for it is dropped.")
      .def("forget", &StageEdge::forget, py::arg("id"),
           "Drop all that is known of a request, of any generation; its id may then be used anew.")
      .def_property_readonly("num_kept", &StageEdge::num_kept, "Requests of which anything is kept.")
      .def("put", &put, py::arg("id"), py::arg("key"), py::arg("rows"), py::arg("begin") = -1,
           "Add rows [n, ...] behind row `begin` of a key, -1: behind the last; those that were given already stay. "
           "False for a dead generation, after the end, or where more rows than the capacity would wait. Raises "
           "InvalidArgument for rank 1, a key that the edge replaces, or a `begin` behind the last row.")
      .def(
          "set",
          [](StageEdge& self, const std::string& id, const PayloadKey& key, py::object value) {
            return self.set(id, key, hold(std::move(value)));
          },
          py::arg("id"), py::arg("key"), py::arg("value"),
          "Keep a value that is no rows, the latest; False for a dead generation and after the end.")
      .def(
          "set_request",
          [](StageEdge& self, const std::string& id, py::object request) {
            return self.set_request(id, hold(std::move(request)));
          },
          py::arg("id"), py::arg("request"), "Keep the latest object of a request; False likewise.")
      .def("end", &StageEdge::end, py::arg("id"), py::arg("status") = EndStatus::ok, py::arg("error") = "",
           "End a request; only the first end counts, others return False. A cancelled request loses what waits.")
      .def("take", py::overload_cast<>(&StageEdge::take),
           "Return what is due now, of all open requests; of a request its end is the last.");
}

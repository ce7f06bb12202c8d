#include <memory>
#include <vector>

#include <pybind11/stl.h>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/batch_memcpy.h"
#include "cpp/src/ops/state_copy.h"
#include "python/bindings/array.h"

using namespace deltaic;

namespace {

TensorView read_integers(py::handle object, const char* what, std::initializer_list<int> sizes,
                         bool is_address = false) {
  const Array array = read_array(object, what);
  const bool right_kind = array.kind == 'i' || (is_address && array.kind == 'u');
  DELTAIC_CHECK(right_kind && std::find(sizes.begin(), sizes.end(), array.elem_size) != sizes.end(), what,
                " has elements of kind ", array.kind, " and ", array.elem_size, " bytes, must be ",
                is_address         ? "uint64 or int64"
                : sizes.size() > 1 ? "int32 or int64"
                                   : "int32");
  return array.view(array.elem_size == 4 ? DType::i32 : DType::i64);
}

// The core looks at the size of a state's elements alone.
TensorView read_state(py::handle object) {
  const Array array = read_array(object, "a state");
  switch (array.elem_size) {
    case 1:
      return array.view(DType::u8);
    case 2:
      return array.view(DType::bf16);
    case 4:
      return array.view(DType::f32);
    case 8:
      return array.view(DType::f64);
    default:
      throw InvalidArgument(detail::concat("a state has elements of ", array.elem_size, " bytes, not 1, 2, 4 or 8"));
  }
}

ops::Stream to_stream(std::uint64_t handle) { return {reinterpret_cast<void*>(handle)}; }

// Threads for copies on the CPU: starting many costs more than it gains for a few bytes.
int num_threads_for(const TensorView& sizes) {
  constexpr std::int64_t kParallelBytes = std::int64_t{4} << 20;
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < sizes.numel() && total < kParallelBytes; ++i)
    total += sizes.dtype == DType::i32 ? sizes.as<std::int32_t>()[i] : sizes.as<std::int64_t>()[i];
  return total < kParallelBytes ? 1 : 0;
}

void batch_memcpy(py::handle src_ptrs, py::handle dst_ptrs, py::handle sizes, std::uint64_t stream) {
  const TensorView src = read_integers(src_ptrs, "src_ptrs", {8}, true);
  const TensorView dst = read_integers(dst_ptrs, "dst_ptrs", {8}, true);
  const TensorView size = read_integers(sizes, "sizes", {4, 8});
  py::gil_scoped_release unlocked;
  std::unique_ptr<ThreadPool> threads;
  if (src.device.type == DeviceType::cpu && size.device.type == DeviceType::cpu && size.is_contiguous())
    threads = std::make_unique<ThreadPool>(num_threads_for(size));
  ops::batch_memcpy({.device = src.device, .stream = to_stream(stream), .threads = threads.get()}, src, dst, size);
}

// A plan with the threads to run it.
class StateCopies {
 public:
  StateCopies(const std::vector<std::tuple<py::object, bool, int>>& states, const std::vector<py::object>& block_tables,
              int block_size, ops::ConvLayout layout)
      : plan_(make_plan(states, block_tables, block_size, layout)) {
    if (plan_.device().type == DeviceType::cpu) threads_ = std::make_unique<ThreadPool>();
  }

  const ops::StateCopyPlan& plan() const { return plan_; }

  void postprocess(int num_reqs, py::handle num_accepted, py::handle state_idx, py::handle num_scheduled,
                   py::handle num_computed, py::handle num_drafts, py::handle num_accepted_out, std::uint64_t stream) {
    auto inputs = read_inputs(num_accepted, state_idx, num_scheduled, num_computed);
    inputs.num_draft_tokens = read_integers(num_drafts, "num_draft_tokens", {4});
    const TensorView out = read_integers(num_accepted_out, "num_accepted_tokens_out", {4});
    py::gil_scoped_release unlocked;
    ops::postprocess_states(context(stream), plan_, num_reqs, inputs, out);
  }

  void preprocess(int num_reqs, py::handle num_accepted, py::handle state_idx, py::handle num_scheduled,
                  py::handle num_computed, py::handle num_accepted_out, py::handle state_idx_out,
                  std::uint64_t stream) {
    const auto inputs = read_inputs(num_accepted, state_idx, num_scheduled, num_computed);
    const TensorView accepted_out = read_integers(num_accepted_out, "num_accepted_tokens_out", {4});
    const TensorView idx_out = read_integers(state_idx_out, "mamba_state_idx_out", {4});
    py::gil_scoped_release unlocked;
    ops::preprocess_states(context(stream), plan_, num_reqs, inputs, accepted_out, idx_out);
  }

 private:
  static ops::StateCopyPlan make_plan(const std::vector<std::tuple<py::object, bool, int>>& states,
                                      const std::vector<py::object>& block_tables, int block_size,
                                      ops::ConvLayout layout) {
    std::vector<ops::StateTensor> tensors;
    std::vector<TensorView> tables;
    for (const py::object& table : block_tables) tables.push_back(read_integers(table, "a block table", {4}));
    const Device device = tables.empty() ? Device{} : tables.front().device;
    for (const auto& [object, is_conv, group] : states) {
      const TensorView state = read_state(object);
      DELTAIC_CHECK(state.device == device, "a state and the block tables are on different devices");
      tensors.push_back(is_conv ? ops::conv_state(state, layout, group) : ops::temporal_state(state, group));
    }
    return {std::move(tensors), tables, block_size, device};
  }

  static ops::StateCopyInputs read_inputs(py::handle num_accepted, py::handle state_idx, py::handle num_scheduled,
                                          py::handle num_computed) {
    return {.num_accepted_tokens = read_integers(num_accepted, "num_accepted_tokens", {4}),
            .state_idx = read_integers(state_idx, "mamba_state_idx", {4}),
            .num_computed_tokens = read_integers(num_computed, "num_computed_tokens", {4}),
            .num_scheduled_tokens = read_integers(num_scheduled, "num_scheduled_tokens", {4})};
  }

  ops::Context context(std::uint64_t stream) const {
    return {.device = plan_.device(), .stream = to_stream(stream), .threads = threads_.get()};
  }

  ops::StateCopyPlan plan_;
  std::unique_ptr<ThreadPool> threads_;
};

py::tuple to_tuple(const std::array<std::int64_t, kMaxRank>& values, int rank) {
  py::tuple result(rank);
  for (int d = 0; d < rank; ++d) result[d] = values[d];
  return result;
}

}  // namespace

void bind_mamba(py::module_& m) {
  py::class_<Array>(m, "ArrayInfo", "Where an array of another library lies. Strides are in elements.")
      .def_readonly("address", &Array::address)
      .def_readonly("itemsize", &Array::elem_size)
      .def_readonly("device", &Array::device)
      .def_property_readonly("shape", [](const Array& array) { return to_tuple(array.shape, array.rank); })
      .def_property_readonly("strides", [](const Array& array) { return to_tuple(array.stride, array.rank); });
  m.def(
      "array_info", [](py::handle array) { return read_array(array, "the argument"); }, py::arg("array"),
      "Read where an array with DLPack or an array interface lies.");
  m.def("batch_memcpy", &batch_memcpy, py::arg("src_ptrs"), py::arg("dst_ptrs"), py::arg("sizes"),
        py::arg("stream") = 0, "Move sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], overlap allowed.");

  py::enum_<ops::ConvLayout>(m, "ConvLayout").value("sd", ops::ConvLayout::sd).value("ds", ops::ConvLayout::ds);
  py::class_<ops::StateTensor>(m, "StateTensor", "One state tensor of one layer, as the copies see it.")
      .def_readonly("base", &ops::StateTensor::base)
      .def_readonly("slot_stride", &ops::StateTensor::slot_stride)
      .def_readonly("elem_size", &ops::StateTensor::elem_size)
      .def_readonly("state_bytes", &ops::StateTensor::state_bytes)
      .def_readonly("row_bytes", &ops::StateTensor::row_bytes)
      .def_readonly("row_stride", &ops::StateTensor::row_stride)
      .def_readonly("num_rows", &ops::StateTensor::num_rows)
      .def_readonly("conv_width", &ops::StateTensor::conv_width)
      .def_readonly("group", &ops::StateTensor::group);
  py::class_<StateCopies>(m, "StateCopies", "All states of a model and their block tables, ready for copies.")
      .def(py::init<const std::vector<std::tuple<py::object, bool, int>>&, const std::vector<py::object>&, int,
                    ops::ConvLayout>(),
           py::arg("states"), py::arg("block_tables"), py::arg("block_size"), py::arg("layout"))
      .def_property_readonly("states", [](const StateCopies& self) { return self.plan().states(); })
      .def_property_readonly("block_table_ptrs",
                             [](const StateCopies& self) {
                               std::vector<std::uint64_t> result;
                               for (const auto& table : self.plan().block_tables())
                                 result.push_back(reinterpret_cast<std::uint64_t>(table.data));
                               return result;
                             })
      .def("postprocess", &StateCopies::postprocess, py::arg("num_reqs"), py::arg("num_accepted_tokens"),
           py::arg("mamba_state_idx"), py::arg("num_scheduled_tokens"), py::arg("num_computed_tokens"),
           py::arg("num_draft_tokens"), py::arg("num_accepted_tokens_out"), py::arg("stream") = 0)
      .def("preprocess", &StateCopies::preprocess, py::arg("num_reqs"), py::arg("num_accepted_tokens"),
           py::arg("mamba_state_idx"), py::arg("num_scheduled_tokens"), py::arg("num_computed_tokens"),
           py::arg("num_accepted_tokens_out"), py::arg("mamba_state_idx_out"), py::arg("stream") = 0);
}

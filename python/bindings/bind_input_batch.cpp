#include <pybind11/stl.h>

#include "cpp/src/runner/input_batch.h"
#include "python/bindings/module.h"

using namespace deltaic;

void bind_input_batch(py::module_& m) {
  py::class_<SamplingMetadata>(m, "SamplingMetadata", "How the rows of a batch are sampled, as lists by row.")
      .def_readonly("temperature", &SamplingMetadata::temperature)
      .def_readonly("top_p", &SamplingMetadata::top_p)
      .def_readonly("top_k", &SamplingMetadata::top_k)
      .def_readonly("min_p", &SamplingMetadata::min_p)
      .def_readonly("generators", &SamplingMetadata::generators)
      .def_readonly("all_greedy", &SamplingMetadata::all_greedy);
  py::class_<InputBatch>(m, "InputBatch", "The rows of the running batch.")
      .def_property_readonly("num_reqs", &InputBatch::num_reqs)
      .def_property_readonly("req_ids", &InputBatch::req_ids)
      .def_property_readonly("req_id_to_index", &InputBatch::req_id_to_index)
      .def_property_readonly("last_sampled_tokens",
                             [](const InputBatch& batch) {
                               const auto tokens = batch.last_sampled_tokens();
                               return std::vector<std::int32_t>(tokens.begin(), tokens.end());
                             })
      .def("num_tokens", &InputBatch::num_tokens, py::arg("row"))
      .def(
          "token_ids",
          [](const InputBatch& batch, int row) {
            const auto tokens = batch.token_ids(row);
            return std::vector<std::int32_t>(tokens.begin(), tokens.end());
          },
          py::arg("row"))
      .def(
          "block_table",
          [](const InputBatch& batch, int group, int row) {
            const auto& table = batch.block_table(group);
            const auto ids = table.row(row).first(static_cast<std::size_t>(table.num_blocks(row)));
            return std::vector<std::int32_t>(ids.begin(), ids.end());
          },
          py::arg("group"), py::arg("row"), "The block ids of a row, in token order.")
      .def(
          "make_sampling_metadata",
          [](const InputBatch& batch, int vocab_size) { return batch.make_sampling_metadata(vocab_size); },
          py::arg("vocab_size"));
}

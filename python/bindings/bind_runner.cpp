#include <deltaic/error.h>
#include <deltaic/runner.h>
#include <deltaic/step_hook.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "cpp/src/runner/input_batch.h"
#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

template <class T>
py::array_t<T> to_array(const std::vector<T>& values, std::vector<py::ssize_t> shape) {
  py::array_t<T> result(std::move(shape));
  std::copy(values.begin(), values.end(), result.mutable_data());
  return result;
}

TensorMap view_tensors(const std::map<std::string, py::array>& tensors) {
  TensorMap views;
  for (const auto& [tensor_name, array] : tensors) {
    if (!py::isinstance<py::array_t<float>>(array) || !(array.flags() & py::array::c_style))
      throw InvalidArgument("tensor " + tensor_name + " must be a contiguous float32 array");
    const std::vector<std::int64_t> shape(array.shape(), array.shape() + array.ndim());
    views[tensor_name] = make_view(const_cast<void*>(array.data()), DType::f32, shape);
  }
  return views;
}

void bind_step_views(py::module_& m) {
  py::class_<StepInputs>(m, "StepInputs", "What the last step ran on.")
      .def_readonly("input_token_ids", &StepInputs::input_token_ids)
      .def_readonly("positions", &StepInputs::positions)
      .def_readonly("query_start_loc", &StepInputs::query_start_loc)
      .def_readonly("logits_indices", &StepInputs::logits_indices);
  py::class_<AttentionMetadataView>(m, "AttentionMetadata", "The attention metadata of the last step.")
      .def_readonly("seq_lens", &AttentionMetadataView::seq_lens)
      .def_readonly("block_table", &AttentionMetadataView::block_table)
      .def_readonly("block_table_row_stride", &AttentionMetadataView::block_table_row_stride)
      .def_readonly("slot_mapping", &AttentionMetadataView::slot_mapping);
  py::class_<GdnMetadataView>(m, "GdnMetadata", "The Gated DeltaNet metadata of the last step.")
      .def_readonly("num_decodes", &GdnMetadataView::num_decodes)
      .def_readonly("num_spec_decodes", &GdnMetadataView::num_spec_decodes)
      .def_readonly("num_prefills", &GdnMetadataView::num_prefills)
      .def_readonly("num_decode_tokens", &GdnMetadataView::num_decode_tokens)
      .def_readonly("num_spec_decode_tokens", &GdnMetadataView::num_spec_decode_tokens)
      .def_readonly("num_prefill_tokens", &GdnMetadataView::num_prefill_tokens)
      .def_readonly("state_indices", &GdnMetadataView::state_indices)
      .def_readonly("prefill_state_indices", &GdnMetadataView::prefill_state_indices)
      .def_readonly("has_initial_state", &GdnMetadataView::has_initial_state)
      .def_readonly("num_accepted_tokens", &GdnMetadataView::num_accepted_tokens)
      .def_readonly("prefill_query_start_loc", &GdnMetadataView::prefill_query_start_loc);
  py::class_<ModelRunner::LayerKvCache>(m, "LayerKvCache", "K and V of one full-attention layer.")
      .def_readonly("k", &ModelRunner::LayerKvCache::k)
      .def_readonly("v", &ModelRunner::LayerKvCache::v)
      .def_readonly("layer", &ModelRunner::LayerKvCache::layer);
  py::class_<ModelRunner::LayerStateCache>(m, "LayerStateCache", "The states of one Gated DeltaNet layer.")
      .def_readonly("conv", &ModelRunner::LayerStateCache::conv)
      .def_readonly("temporal", &ModelRunner::LayerStateCache::temporal)
      .def_readonly("layer", &ModelRunner::LayerStateCache::layer);
}

// Logits [num_tokens, vocab_size] and hidden states [num_layers + 2, num_tokens, hidden_size] or None.
py::tuple dense_forward(ModelRunner& runner, const std::vector<std::int32_t>& token_ids, bool with_hidden,
                        const std::optional<std::vector<std::vector<std::int64_t>>>& positions) {
  std::vector<std::int64_t> flat;
  if (positions)
    for (const auto& stream : *positions) flat.insert(flat.end(), stream.begin(), stream.end());
  DenseForwardOutput output;
  {
    py::gil_scoped_release unlocked;
    output = runner.dense_forward(token_ids, with_hidden, flat);
  }
  const auto& model = runner.model_config();
  const auto num_tokens = static_cast<py::ssize_t>(token_ids.size());
  py::object hidden = py::none();
  if (with_hidden) hidden = to_array(output.hidden, {model.num_layers + 2, num_tokens, model.hidden_size});
  return py::make_tuple(to_array(output.logits, {num_tokens, model.vocab_size}), hidden);
}

// Greedy drafts: token ids [num_drafts], their logits [num_drafts, vocab_size], and what the draft module gives for the
// sequence [num_tokens, hidden_size].
py::tuple dense_draft(ModelRunner& runner, const std::vector<std::int32_t>& token_ids, std::int32_t next_token,
                      int num_drafts) {
  DenseDraftOutput output;
  {
    py::gil_scoped_release unlocked;
    output = runner.dense_draft(token_ids, next_token, num_drafts);
  }
  const auto& model = runner.model_config();
  return py::make_tuple(output.token_ids, to_array(output.logits, {num_drafts, model.vocab_size}),
                        to_array(output.hidden, {static_cast<py::ssize_t>(token_ids.size()), model.hidden_size}));
}

}  // namespace

void bind_runner(py::module_& m) {
  bind_step_views(m);
  Struct<RunnerOptions>(m, "RunnerOptions", "Sizes and switches of a ModelRunner.")
      .field("device", &RunnerOptions::device)
      .field("dtype", &RunnerOptions::dtype)
      .field("max_num_reqs", &RunnerOptions::max_num_reqs)
      .field("max_model_len", &RunnerOptions::max_model_len)
      .field("max_num_batched_tokens", &RunnerOptions::max_num_batched_tokens)
      .field("num_speculative_tokens", &RunnerOptions::num_speculative_tokens)
      .field("num_threads", &RunnerOptions::num_threads)
      .field("async_input_combine", &RunnerOptions::async_input_combine)
      .field("poison_caches", &RunnerOptions::poison_caches)
      .field("enforce_eager", &RunnerOptions::enforce_eager)
      .field("dummy_weights", &RunnerOptions::dummy_weights)
      .field("scripted_draft_acceptance", &RunnerOptions::scripted_draft_acceptance);
  py::class_<AsyncModelRunnerOutput>(m, "AsyncModelRunnerOutput", "The tokens of a step that may still run.")
      .def(
          "get_output",
          [](AsyncModelRunnerOutput& self) {
            py::gil_scoped_release unlocked;
            return self.get_output();
          },
          "Wait for the step and return its output; once.");
  m.def(
      "validate_gdn_state_indices",
      [](const std::vector<std::int32_t>& indices, int required, int num_slots) {
        validate_gdn_state_indices(indices, required, num_slots);
      },
      py::arg("indices"), py::arg("required"), py::arg("num_slots"),
      "Raise InvalidArgument, naming the row, for state indices that a step must not use.");

  py::class_<ModelRunner>(m, "ModelRunner", "Runs one model: a SchedulerOutput in, sampled tokens out.")
      .def(py::init([](const ModelConfig& model, const std::map<std::string, py::array>& tensors,
                       const KVCacheConfig& kv_cache, const RunnerOptions& options) {
             return ModelRunner(model, view_tensors(tensors), kv_cache, options);
           }),
           py::arg("model"), py::arg("tensors"), py::arg("kv_cache"), py::arg("options"), py::keep_alive<1, 3>(),
           "Take the weights from contiguous float32 arrays in memory, under their checkpoint names.")
      .def(py::init([](const std::filesystem::path& checkpoint, const KVCacheConfig& kv_cache,
                       const RunnerOptions& options) {
             py::gil_scoped_release unlocked;
             return ModelRunner(checkpoint, kv_cache, options);
           }),
           py::arg("checkpoint"), py::arg("kv_cache"), py::arg("options"))
      .def(
          "execute_model",
          [](ModelRunner& self, const SchedulerOutput& input) {
            py::gil_scoped_release unlocked;
            return self.execute_model(input);
          },
          py::arg("input"), "Enqueue one step; an output without tokens when nothing was scheduled, else None.")
      .def("set_step_hook", &ModelRunner::set_step_hook, py::arg("hook"),
           "Call a hook around each forward from now on; None: no more.")
      .def(
          "sample_tokens",
          [](ModelRunner& self) {
            py::gil_scoped_release unlocked;
            return self.sample_tokens();
          },
          "Sample from the last forward, and wait.")
      .def(
          "sample_tokens_async",
          [](ModelRunner& self) {
            py::gil_scoped_release unlocked;
            return self.sample_tokens_async();
          },
          "Sample from the last forward without waiting.")
      .def_property_readonly("model_config", &ModelRunner::model_config, py::return_value_policy::reference_internal)
      .def_property_readonly("kv_cache_config", &ModelRunner::kv_cache_config)
      .def_property_readonly("options", &ModelRunner::options)
      .def_property_readonly("full_attn_group_id", &ModelRunner::full_attn_group_id)
      .def_property_readonly("gdn_group_id", &ModelRunner::gdn_group_id)
      .def_property_readonly("num_blocks", &ModelRunner::num_blocks)
      .def_property_readonly("fa_page_size_bytes", &ModelRunner::fa_page_size_bytes)
      .def_property_readonly("num_state_slots", &ModelRunner::num_state_slots)
      .def_property_readonly("weight_bytes", &ModelRunner::weight_bytes)
      .def_property_readonly("cache_bytes", &ModelRunner::cache_bytes)
      .def_static("supports_async", &ModelRunner::supports_async)
      .def_property_readonly("attn_kv", &ModelRunner::attn_kv, py::return_value_policy::reference_internal)
      .def_property_readonly("gdn_state", &ModelRunner::gdn_state, py::return_value_policy::reference_internal)
      .def_property_readonly("gdn_state_slots", &ModelRunner::gdn_state_slots)
      .def_property_readonly("input_batch", &ModelRunner::input_batch, py::return_value_policy::reference_internal)
      .def_property_readonly("last_step", &ModelRunner::last_step)
      .def_property_readonly("last_attn_meta", &ModelRunner::last_attn_meta)
      .def_property_readonly("last_gdn_meta", &ModelRunner::last_gdn_meta)
      .def("dense_forward", &dense_forward, py::arg("token_ids"), py::arg("with_hidden") = false,
           py::arg("positions") = py::none(),
           "Logits of every position of one sequence, computed on its own: [num_tokens, vocab_size]; and the hidden "
           "states [num_layers + 2, num_tokens, hidden_size] when asked for, else None.")
      .def("dense_draft", &dense_draft, py::arg("token_ids"), py::arg("next_token"), py::arg("num_drafts"),
           "A chain of greedy drafts behind a sequence and the token that follows it, computed on its own: their ids, "
           "their logits [num_drafts, vocab_size], and the draft module's hidden states [num_tokens, hidden_size].");
}

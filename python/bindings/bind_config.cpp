#include <deltaic/config.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "python/bindings/module.h"

using namespace deltaic;

void bind_config(py::module_& m) {
  py::enum_<Architecture>(m, "Architecture")
      .value("qwen3", Architecture::qwen3)
      .value("qwen3_moe", Architecture::qwen3_moe)
      .value("qwen3_next", Architecture::qwen3_next)
      .value("qwen3_5", Architecture::qwen3_5)
      .value("qwen3_5_moe", Architecture::qwen3_5_moe);
  py::enum_<LayerKind>(m, "LayerKind")
      .value("full_attention", LayerKind::full_attention)
      .value("linear_attention", LayerKind::linear_attention);
  py::class_<ModelConfig>(m, "ModelConfig", "What a Hugging Face config.json says of the text model.")
      .def_readonly("architecture", &ModelConfig::architecture)
      .def_readonly("vocab_size", &ModelConfig::vocab_size)
      .def_readonly("hidden_size", &ModelConfig::hidden_size)
      .def_readonly("intermediate_size", &ModelConfig::intermediate_size)
      .def_readonly("num_layers", &ModelConfig::num_layers)
      .def_readonly("layer_kinds", &ModelConfig::layer_kinds)
      .def_readonly("is_moe_layer", &ModelConfig::is_moe_layer)
      .def_readonly("tie_word_embeddings", &ModelConfig::tie_word_embeddings)
      .def_readonly("max_position_embeddings", &ModelConfig::max_position_embeddings)
      .def_readonly("eos_token_ids", &ModelConfig::eos_token_ids)
      .def_readonly("dtype", &ModelConfig::dtype)
      .def_readonly("num_heads", &ModelConfig::num_heads)
      .def_readonly("num_kv_heads", &ModelConfig::num_kv_heads)
      .def_readonly("head_dim", &ModelConfig::head_dim)
      .def_readonly("linear_num_key_heads", &ModelConfig::linear_num_key_heads)
      .def_readonly("linear_num_value_heads", &ModelConfig::linear_num_value_heads)
      .def_readonly("linear_key_head_dim", &ModelConfig::linear_key_head_dim)
      .def_readonly("linear_value_head_dim", &ModelConfig::linear_value_head_dim)
      .def_readonly("linear_conv_kernel_dim", &ModelConfig::linear_conv_kernel_dim)
      .def_readonly("num_experts", &ModelConfig::num_experts)
      .def_readonly("num_experts_per_token", &ModelConfig::num_experts_per_token)
      .def_readonly("moe_intermediate_size", &ModelConfig::moe_intermediate_size)
      .def_readwrite("shared_expert_intermediate_size", &ModelConfig::shared_expert_intermediate_size)
      .def_readonly("attention_bias", &ModelConfig::attention_bias)
      .def_readonly("attention_output_gate", &ModelConfig::attention_output_gate)
      .def_readonly("num_mtp_layers", &ModelConfig::num_mtp_layers)
      .def("num_layers_of", &ModelConfig::num_layers_of, py::arg("kind"))
      .def("conv_dim", &ModelConfig::conv_dim)
      .def("num_parameters", &ModelConfig::num_parameters);
  m.def("load_model_config", &load_model_config, py::arg("path"),
        "Read the config.json of a checkpoint folder, or the file itself.");
  m.def("count_draft_layers", &count_draft_layers, py::arg("checkpoint"),
        "Count the layers of the draft module (mtp.*) that a checkpoint folder has.");
  m.def("parse_model_config", &parse_model_config, py::arg("json"), "Read the text of a config.json.");
}

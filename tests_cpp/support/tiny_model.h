#pragma once

#include <list>
#include <string>
#include <vector>

#include <deltaic/config.h>
#include <deltaic/runner.h>

namespace deltaic::test {

struct TinyModelOptions {
  std::string prefix = "model.";
  bool tied = false;
  bool fused_experts = false;
  bool attention_bias = false;
  int shared_intermediate = 24;
  bool mtp = false;  // with a draft module
  std::uint64_t seed = 1;
  std::string extra_config = "";  // more members of config.json: "\"decoder_sparse_step\": 2"
};

// A model of a few thousand parameters with random f32 weights under checkpoint names: hidden 32, 4 layers, vocabulary
// 64; hybrids have linear, linear, linear, full with 2 key and 4 value heads.
struct TinyModel {
  ModelConfig config;
  TensorMap tensors;
  std::list<std::vector<float>> memory;  // of the tensors

  // Adds or replaces a tensor with these values.
  void set(const std::string& name, std::vector<std::int64_t> shape, std::vector<float> values);
  std::vector<float> values(const std::string& name) const;
};

TinyModel make_tiny_model(Architecture architecture, const TinyModelOptions& options = {});

}  // namespace deltaic::test

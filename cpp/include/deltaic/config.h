#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <deltaic/tensor.h>

namespace deltaic {

enum class Architecture : std::uint8_t { qwen3, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe };
enum class LayerKind : std::uint8_t { full_attention, linear_attention };

std::string_view name(Architecture architecture);

enum class RopeType : std::uint8_t { standard, linear, yarn };

// Rotary embedding. The yarn fields are ignored for the other types.
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double factor = 1.0;
  double original_max_position_embeddings = 0.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  std::optional<double> attention_factor;
  // Frequencies that take the temporal, height and width position (interleaved M-RoPE); all 0 for 1-D rope.
  std::array<int, 3> mrope_section{};
};

// What a Hugging Face config.json says of the text model; docs/models.md, "Configuration" has the keys and their
// defaults. Plain data; parse_model_config fills and checks it.
struct ModelConfig {
  Architecture architecture = Architecture::qwen3;
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;  // of dense MLP layers; 0 when there are none
  int num_layers = 0;
  std::vector<LayerKind> layer_kinds;  // [num_layers]
  std::vector<bool> is_moe_layer;      // [num_layers]
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  int max_position_embeddings = 0;
  std::vector<int> eos_token_ids;  // as config.json has them; may be empty
  std::optional<DType> dtype;      // informative: each tensor says its own

  // full attention
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;  // channels of a head that rotate
  bool attention_bias = false;
  bool attention_output_gate = false;
  RopeConfig rope;

  // Gated DeltaNet; 0 when there is no such layer
  int linear_num_key_heads = 0;
  int linear_num_value_heads = 0;
  int linear_key_head_dim = 0;
  int linear_value_head_dim = 0;
  int linear_conv_kernel_dim = 0;

  // mixture of experts; 0 when there is no such layer
  int num_experts = 0;
  int num_experts_per_token = 0;
  int moe_intermediate_size = 0;
  int shared_expert_intermediate_size = 0;
  bool norm_topk_prob = false;

  int num_mtp_layers = 0;  // layers of the draft module as announced; count_draft_layers says what there is

  bool is_hybrid_family() const { return architecture >= Architecture::qwen3_next; }
  bool norm_is_zero_centred() const { return is_hybrid_family(); }
  int num_layers_of(LayerKind kind) const;
  // Convolution channels of a GDN layer: q, k and v of all heads.
  int conv_dim() const {
    return 2 * linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * linear_value_head_dim;
  }
  // Parameters of the text model by its shapes, without the draft module.
  std::int64_t num_parameters() const;
};

// A rank of a model that several devices share. This version runs one: sizes above 1 are refused where a model is
// loaded.
struct ParallelConfig {
  int tensor_parallel_size = 1;
  int rank = 0;
};

// Reads the text part of a config.json (published, transformers 4 and transformers 5 styles). Throws
// InvalidArgument naming the field for missing, contradictory or out-of-range values, Unsupported for an
// architecture or an option that deltaic does not have.
ModelConfig parse_model_config(std::string_view json);
// `path`: a checkpoint folder, or a config.json. Throws as parse_model_config, naming the file, and InvalidArgument
// when it cannot be read.
ModelConfig load_model_config(const std::filesystem::path& path);
// Layers of the draft module (mtp.layers.*) that a checkpoint folder has, whatever its config.json says. Throws
// InvalidArgument when the folder has no readable weights.
int count_draft_layers(const std::filesystem::path& checkpoint);

}  // namespace deltaic

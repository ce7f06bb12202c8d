#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/loader/safetensors.h"

namespace deltaic {

// The tensors of one checkpoint under their names (docs/models.md, "Tensor names") without the prefix:
// "embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight", "mtp.fc.weight". Tensors of a vision tower
// are left out; other tensors that the text model does not have are kept under their own name and do no harm. Nothing
// is copied.
class Checkpoint {
 public:
  // A folder with model.safetensors or model.safetensors.index.json. Throws InvalidArgument as the readers of
  // safetensors.h do, when the folder has neither, and when a tensor is there under both prefixes.
  static Checkpoint open(const std::filesystem::path& folder);
  // Tensors in memory, which must outlive the checkpoint and what is made from it.
  static Checkpoint from_memory(const TensorMap& tensors);

  // The same of tensors that hold on to their memory; `source` names them in messages.
  static Checkpoint from_stored(const StoredTensors& tensors, std::string source) {
    return Checkpoint(tensors, std::move(source));
  }

  bool has(std::string_view name) const { return tensors_.contains(std::string(name)); }
  // Throws InvalidArgument for a tensor that is missing, or whose shape is not `shape`, naming tensor, wanted and found
  // shape; Unsupported for a dtype or rank that deltaic has not.
  const StoredTensor& get(std::string_view name, std::span<const std::int64_t> shape) const;
  // The name as the checkpoint has, or would have it, with its prefix.
  std::string stored_name(std::string_view name) const;
  // Names that start with `prefix`, in order.
  std::vector<std::string> names(std::string_view prefix) const;

 private:
  Checkpoint(const StoredTensors& tensors, std::string source);

  std::string source_;  // for messages
  std::string prefix_ = "model.";
  StoredTensors tensors_;
};

}  // namespace deltaic

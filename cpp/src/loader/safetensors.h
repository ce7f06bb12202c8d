#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include <deltaic/tensor.h>

namespace deltaic {

// A tensor as a file holds it.
struct StoredTensor {
  TensorView view;                    // into the mapped file: read-only, and aligned only as the file has it
  std::shared_ptr<const void> owner;  // keeps the mapping alive; null when the caller does
  std::string unreadable;             // why there is no view, for a message; empty when there is one
};

// Name -> tensor, in the order of names.
using StoredTensors = std::map<std::string, StoredTensor>;

// Maps one safetensors file; no tensor is read or copied. Every error is an InvalidArgument that names the file and
// the tensor: a file that is missing or shorter than its header says, a header that is absurdly long or not JSON, a
// name that appears twice, an entry whose offsets are reversed, outside the data, overlapping another's, or not the
// size of its shape and dtype. A tensor of a dtype or rank that deltaic has not is listed as unreadable: only asking
// for it is an error.
StoredTensors open_safetensors(const std::filesystem::path& file);

// Maps the shards that an index (model.safetensors.index.json) lists, and gives the tensors of its weight_map. Throws
// InvalidArgument as above, and for a shard that is not on disk, or does not hold a tensor that the index says it has.
StoredTensors open_safetensors_index(const std::filesystem::path& index);

}  // namespace deltaic

#include "cpp/src/stages/stage_tensors.h"

#include "cpp/src/check.h"

namespace deltaic {

StoredTensors open_stage_tensors(const std::filesystem::path& path) {
  std::error_code ignored;
  DELTAIC_CHECK(std::filesystem::exists(path, ignored), path.string(), " does not exist");
  if (!std::filesystem::is_directory(path, ignored)) return open_safetensors(path);
  const auto single = path / "model.safetensors", index = path / "model.safetensors.index.json";
  if (std::filesystem::exists(single, ignored)) return open_safetensors(single);
  DELTAIC_CHECK(std::filesystem::exists(index, ignored), path.string(),
                " has neither model.safetensors nor model.safetensors.index.json");
  return open_safetensors_index(index);
}

StoredTensors part_of(const StoredTensors& tensors, std::string_view prefix) {
  StoredTensors part;
  for (auto it = tensors.lower_bound(std::string(prefix)); it != tensors.end() && it->first.starts_with(prefix); ++it)
    part.emplace(it->first.substr(prefix.size()), it->second);
  DELTAIC_CHECK(!part.empty(), "the checkpoint has no tensor whose name starts with ", prefix);
  return part;
}

StoredTensors as_text_model(const StoredTensors& part, const std::string& embedding, const std::string& head) {
  StoredTensors text = part;
  const auto alias = [&](const std::string& from, const std::string& to) {
    const auto found = part.find(from);
    DELTAIC_CHECK(found != part.end(), "the tensor ", from, " is missing");
    text[to] = found->second;
  };
  alias(embedding, "model.embed_tokens.weight");
  alias(head, "lm_head.weight");
  return text;
}

}  // namespace deltaic

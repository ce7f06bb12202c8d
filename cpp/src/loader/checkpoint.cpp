#include "cpp/src/loader/checkpoint.h"

#include <sstream>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

constexpr std::string_view kPlainPrefix = "model.";
constexpr std::string_view kNestedPrefix = "model.language_model.";
constexpr std::string_view kVisionPrefix = "model.visual.";

// These never have a prefix.
bool is_unprefixed(std::string_view name) { return name.starts_with("lm_head.") || name.starts_with("mtp."); }

std::string show_shape(std::span<const std::int64_t> shape) {
  std::ostringstream text;
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "[" : ", ") << shape[i];
  text << (shape.empty() ? "[]" : "]");
  return std::move(text).str();
}

}  // namespace

Checkpoint Checkpoint::open(const std::filesystem::path& folder) {
  std::error_code ignored;  // a path that cannot be looked at is reported as missing
  DELTAIC_CHECK(std::filesystem::exists(folder, ignored), folder.string(), " does not exist");
  DELTAIC_CHECK(std::filesystem::is_directory(folder, ignored), folder.string(), " is not a folder");
  const auto single = folder / "model.safetensors";
  const auto index = folder / "model.safetensors.index.json";
  if (std::filesystem::exists(single, ignored)) return Checkpoint(open_safetensors(single), folder.string());
  DELTAIC_CHECK(std::filesystem::exists(index, ignored), folder.string(),
                " has neither model.safetensors nor model.safetensors.index.json");
  return Checkpoint(open_safetensors_index(index), folder.string());
}

Checkpoint Checkpoint::from_memory(const TensorMap& tensors) {
  StoredTensors stored;
  for (const auto& [name, view] : tensors) {
    DELTAIC_CHECK(view.is_contiguous(), "the tensor ", name, " is not contiguous");
    stored.emplace(name, StoredTensor{.view = view, .owner = {}, .unreadable = {}});
  }
  return Checkpoint(stored, "the tensors in memory");
}

Checkpoint::Checkpoint(const StoredTensors& tensors, std::string source) : source_(std::move(source)) {
  for (const auto& [stored_name, tensor] : tensors) {
    std::string_view name = stored_name;
    if (name.starts_with(kVisionPrefix)) continue;
    for (const std::string_view prefix : {kNestedPrefix, kPlainPrefix})
      if (name.starts_with(prefix) && !is_unprefixed(name.substr(prefix.size()))) {
        name.remove_prefix(prefix.size());
        if (prefix == kNestedPrefix) prefix_ = kNestedPrefix;
        break;
      }
    const bool is_new = tensors_.emplace(name, tensor).second;
    DELTAIC_CHECK(is_new, source_, " has the tensor ", name, " twice: with and without a prefix, or under both of ",
                  kPlainPrefix, " and ", kNestedPrefix);
  }
}

std::string Checkpoint::stored_name(std::string_view name) const {
  return is_unprefixed(name) ? std::string(name) : prefix_ + std::string(name);
}

const StoredTensor& Checkpoint::get(std::string_view name, std::span<const std::int64_t> shape) const {
  const auto found = tensors_.find(std::string(name));
  DELTAIC_CHECK(found != tensors_.end(), source_, ": the tensor ", stored_name(name), " is missing, wanted ",
                show_shape(shape));
  const StoredTensor& tensor = found->second;
  if (!tensor.unreadable.empty())
    throw Unsupported(detail::concat(source_, ": the tensor ", stored_name(name), " ", tensor.unreadable,
                                     ", which is not supported"));
  const std::span<const std::int64_t> stored(tensor.view.shape.data(), static_cast<std::size_t>(tensor.view.rank));
  DELTAIC_CHECK(std::equal(stored.begin(), stored.end(), shape.begin(), shape.end()), source_, ": the tensor ",
                stored_name(name), " has shape ", show_shape(stored), ", wanted ", show_shape(shape));
  return tensor;
}

std::vector<std::string> Checkpoint::names(std::string_view prefix) const {
  std::vector<std::string> result;
  for (auto it = tensors_.lower_bound(std::string(prefix)); it != tensors_.end() && it->first.starts_with(prefix); ++it)
    result.push_back(it->first);
  return result;
}

}  // namespace deltaic

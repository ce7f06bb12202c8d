#include <deltaic/cache.h>

#include "cpp/src/check.h"

namespace deltaic {
namespace {

std::int64_t padded(std::string_view spec, std::int64_t page_bytes, std::optional<std::int64_t> page_size_padded) {
  if (!page_size_padded) return page_bytes;
  DELTAIC_CHECK(*page_size_padded >= page_bytes, spec, ": page_size_padded is ", *page_size_padded,
                " bytes, the page itself has ", page_bytes);
  return *page_size_padded;
}

}  // namespace

std::int64_t FullAttentionSpec::page_size_bytes() const {
  DELTAIC_CHECK(block_size >= 1, "FullAttentionSpec: block_size is ", block_size, ", want at least 1");
  DELTAIC_CHECK(num_kv_heads >= 1, "FullAttentionSpec: num_kv_heads is ", num_kv_heads, ", want at least 1");
  DELTAIC_CHECK(head_size >= 1 && head_size_v >= 0, "FullAttentionSpec: head_size is ", head_size, ", head_size_v ",
                head_size_v, ", want at least 1 and 0");
  const std::int64_t row = head_size + (head_size_v > 0 ? head_size_v : head_size);
  return padded("FullAttentionSpec", row * block_size * num_kv_heads * static_cast<std::int64_t>(size_of(dtype)),
                page_size_padded);
}

std::int64_t MambaSpec::page_size_bytes() const {
  DELTAIC_CHECK(shapes.size() == dtypes.size(), "MambaSpec: ", shapes.size(), " shapes, ", dtypes.size(), " dtypes");
  std::int64_t page_bytes = 0;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    std::int64_t numel = 1;
    for (const std::int64_t size : shapes[i]) {
      DELTAIC_CHECK(size >= 0, "MambaSpec: state ", i, " has a dimension of ", size);
      numel *= size;
    }
    page_bytes += numel * static_cast<std::int64_t>(size_of(dtypes[i]));
  }
  return padded("MambaSpec", page_bytes, page_size_padded);
}

std::int64_t MambaSpec::replay_bytes() const {
  if (num_speculative_blocks == 0 || mamba_type != MambaType::gdn) return 0;
  DELTAIC_CHECK(shapes.size() == 2 && shapes[0].size() == 2 && shapes[1].size() == 3,
                "MambaSpec: a GDN layer has 2 states, conv [conv_dim, width] and temporal [heads, dim, dim]");
  // k of the key heads, the updates of the values, and a decay a value head, of each token.
  const std::int64_t heads = shapes[1][0], values = heads * shapes[1][1], keys = (shapes[0][0] - values) / 2;
  return (1 + num_speculative_blocks) * (keys + values + heads) * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t UniformTypeKVCacheSpecs::page_size_bytes() const {
  std::int64_t page_bytes = 0;
  for (const auto& [name, spec] : layer_specs)
    page_bytes += std::visit([](const auto& layer) { return layer.page_size_bytes(); }, spec);
  return page_bytes;
}

std::int64_t UniformTypeKVCacheSpecs::replay_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [name, spec] : layer_specs)
    if (const auto* layer = std::get_if<MambaSpec>(&spec)) bytes += layer->replay_bytes();
  return bytes;
}

}  // namespace deltaic

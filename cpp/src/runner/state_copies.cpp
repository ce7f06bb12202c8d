#include "cpp/src/runner/state_copies.h"

#include "cpp/src/ops/batch_memcpy.h"

namespace deltaic {

StateCopier::StateCopier(std::span<const ModelRunner::LayerStateCache> caches) {
  for (const ModelRunner::LayerStateCache& cache : caches)
    for (const TensorView& view : {cache.conv, cache.temporal}) {
      const auto element_bytes = static_cast<std::int64_t>(size_of(view.dtype));
      rows_.push_back({.base = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data)),
                       .stride_bytes = view.stride[0] * element_bytes,
                       .row_bytes = view.numel() / view.shape[0] * element_bytes});
    }
}

void StateCopier::write(int from_slot, int to_slot, std::int64_t* sources, std::int64_t* destinations,
                        std::int64_t* sizes) const {
  for (const Rows& rows : rows_) {
    *sources++ = rows.base + from_slot * rows.stride_bytes;
    *destinations++ = rows.base + to_slot * rows.stride_bytes;
    *sizes++ = rows.row_bytes;
  }
}

void StateCopier::add(int from_slot, int to_slot) {
  const std::size_t end = sizes_.size() + rows_.size();
  for (auto* list : {&sources_, &destinations_, &sizes_}) list->resize(end);
  const std::size_t at = end - rows_.size();
  write(from_slot, to_slot, sources_.data() + at, destinations_.data() + at, sizes_.data() + at);
}

void StateCopier::run(const ops::Context& ctx) {
  if (sizes_.empty()) return;
  const auto count = static_cast<std::int64_t>(sizes_.size());
  const auto view = [&](std::vector<std::int64_t>& values) {
    return make_view(values.data(), DType::i64, {count}, ctx.device);
  };
  ops::batch_memcpy(ctx, view(sources_), view(destinations_), view(sizes_));
  sources_.clear(), destinations_.clear(), sizes_.clear();
}

}  // namespace deltaic

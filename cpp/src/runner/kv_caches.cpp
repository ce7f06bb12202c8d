#include "cpp/src/runner/kv_caches.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "cpp/src/check.h"
#include "cpp/src/core/cuda_runtime.h"

namespace deltaic {

namespace {

std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

void fill_with_nan(void* data, std::int64_t num_bytes, DType dtype) {
  const auto count = static_cast<std::size_t>(num_bytes) / size_of(dtype);
  if (dtype == DType::f32) {
    std::fill_n(static_cast<float*>(data), count, std::numeric_limits<float>::quiet_NaN());
  } else {
    const std::uint16_t quiet_nan = dtype == DType::f16 ? 0x7E00 : 0x7FC0;
    std::fill_n(static_cast<std::uint16_t*>(data), count, quiet_nan);
  }
}

// All bits set are a NaN in every floating-point type.
void poison_device(void* data, std::int64_t num_bytes) {
  const cuda::Stream stream;
  cuda::fill_async(stream, data, 0xFF, static_cast<std::size_t>(num_bytes));
  stream.wait();
}

// What all caches need, for a message before the first of them is allocated.
void check_device_memory(const CacheGroups& groups, std::int64_t num_blocks, const RunnerOptions& options) {
  if (options.device.type == DeviceType::cpu) return;
  std::int64_t kv_bytes = 0, state_bytes = 0;
  for (const FullAttentionSpec& spec : groups.attention_specs) kv_bytes += num_blocks * spec.page_size_bytes();
  if (groups.draft_group >= 0) kv_bytes += num_blocks * groups.draft_spec.page_size_bytes();
  for (const MambaSpec& spec : groups.state_specs)
    state_bytes += groups.num_state_slots() * spec.page_size_bytes() + groups.num_running_slots * spec.replay_bytes();
  const DeviceMemory memory = device_memory(options.device);
  if (kv_bytes + state_bytes <= memory.free_bytes) return;
  throw OutOfMemory(detail::concat(
      "the caches need ", kv_bytes + state_bytes, " bytes (", kv_bytes, " for ", num_blocks, " attention blocks, ",
      state_bytes, " for ", groups.num_state_slots(), " recurrent states), CUDA device ", options.device.index, " has ",
      memory.free_bytes, " of ", memory.total_bytes, " bytes free beside the weights: lower gpu_memory_utilization or ",
      "kv_cache_memory_bytes, max_model_len or max_num_seqs"));
}

// [num_rows, row_shape...] with its own stride between rows.
TensorView strided_rows(void* data, DType dtype, std::int64_t num_rows, const std::vector<std::int64_t>& row_shape,
                        std::int64_t row_stride, Device device) {
  std::vector<std::int64_t> shape{num_rows};
  shape.insert(shape.end(), row_shape.begin(), row_shape.end());
  TensorView view = make_view(data, dtype, shape, device);
  view.stride[0] = row_stride;
  return view;
}

}  // namespace

KvCaches::KvCaches(const ModelConfig& model, const CacheGroups& groups, std::int64_t num_blocks,
                   const RunnerOptions& options) {
  check_device_memory(groups, num_blocks, options);
  std::size_t next_attention = 0;
  std::size_t next_state = 0;
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const bool is_gdn =
        groups.gdn_group >= 0 && model.layer_kinds[static_cast<std::size_t>(layer)] == LayerKind::linear_attention;
    if (!is_gdn) {
      const FullAttentionSpec& spec = groups.attention_specs[next_attention++];
      const AttentionCacheViews pages = allocate_pages(spec, num_blocks, options);
      attention_.push_back({.k = pages.k, .v = pages.v, .layer = layer});
      attention_views_.push_back(pages);
    } else {
      const MambaSpec& spec = groups.state_specs[next_state++];
      const std::int64_t num_slots = groups.num_state_slots();
      const std::int64_t conv_elements = product(spec.shapes[0]);
      const std::int64_t conv_bytes = conv_elements * static_cast<std::int64_t>(size_of(spec.dtypes[0]));
      const std::int64_t temporal_row_bytes = spec.page_size_bytes() - conv_bytes;
      const auto temporal_element_bytes = static_cast<std::int64_t>(size_of(spec.dtypes[1]));
      if (temporal_row_bytes % temporal_element_bytes != 0)
        throw Unsupported(detail::concat(groups.group_names[static_cast<std::size_t>(groups.gdn_group)],
                                         ": page_size_padded of ", spec.page_size_bytes(), " bytes leaves ",
                                         temporal_row_bytes, " for a temporal row, not a multiple of ",
                                         temporal_element_bytes));
      void* conv = allocate(num_slots * conv_bytes, spec.dtypes[0], options);
      void* temporal = allocate(num_slots * temporal_row_bytes, spec.dtypes[1], options);
      state_.push_back(
          {.conv = strided_rows(conv, spec.dtypes[0], num_slots, spec.shapes[0], conv_elements, options.device),
           .temporal = strided_rows(temporal, spec.dtypes[1], num_slots, spec.shapes[1],
                                    temporal_row_bytes / temporal_element_bytes, options.device),
           .layer = layer});
      state_views_.push_back({.conv = state_.back().conv, .temporal = state_.back().temporal});
      if (const std::int64_t replay_bytes = spec.replay_bytes(); replay_bytes > 0) {
        const std::int64_t num_rows = 1 + spec.num_speculative_blocks;
        state_views_.back().replay = make_view(
            allocate(groups.num_running_slots * replay_bytes, DType::f32, options), DType::f32,
            {groups.num_running_slots, num_rows, replay_bytes / num_rows / static_cast<std::int64_t>(sizeof(float))},
            options.device);
      }
    }
  }
  if (groups.draft_group >= 0) draft_ = allocate_pages(groups.draft_spec, num_blocks, options);
}

AttentionCacheViews KvCaches::allocate_pages(const FullAttentionSpec& spec, std::int64_t num_blocks,
                                             const RunnerOptions& options) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(spec.dtype));
  const std::int64_t page_bytes = spec.page_size_bytes();
  const std::vector<std::int64_t> block{spec.block_size, spec.num_kv_heads, spec.head_size};
  auto* data = static_cast<std::byte*>(allocate(num_blocks * page_bytes, spec.dtype, options));
  const auto at = [&](std::int64_t offset) {
    return strided_rows(data + offset, spec.dtype, num_blocks, block, page_bytes / element_bytes, options.device);
  };
  return {.k = at(0), .v = at(product(block) * element_bytes)};
}

void* KvCaches::allocate(std::int64_t num_bytes, DType dtype, const RunnerOptions& options) {
  void* data = buffers_.emplace_back(static_cast<std::size_t>(num_bytes), options.device).data();
  if (options.poison_caches && options.device.type == DeviceType::cuda)
    poison_device(data, num_bytes);
  else if (options.poison_caches)
    fill_with_nan(data, num_bytes, dtype);
  num_bytes_ += num_bytes;
  return data;
}

}  // namespace deltaic

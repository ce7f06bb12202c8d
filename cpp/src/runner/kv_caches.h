#pragma once

#include <cstdint>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/core/buffer.h"
#include "cpp/src/models/hybrid_decoder.h"
#include "cpp/src/runner/cache_groups.h"

namespace deltaic {

// The memory of all caches of a runner: one paged K/V cache a full-attention layer, one conv and one temporal state
// cache a GDN layer. Zeroed, or filled with NaN when options.poison_caches is set.
//
// A K/V page is [K of the block | V of the block | padding]: its size is the block stride of both views. A state slot
// is a row of the conv cache and a row of the temporal cache; padding of a padded spec lies behind the temporal row.
// With speculation a running slot has replay rows too.
class KvCaches {
 public:
  // Throws OutOfMemory with the number of bytes, Unsupported for a padding that no stride can honour.
  KvCaches(const ModelConfig& model, const CacheGroups& groups, std::int64_t num_blocks, const RunnerOptions& options);

  const std::vector<ModelRunner::LayerKvCache>& attention() const { return attention_; }
  const std::vector<ModelRunner::LayerStateCache>& state() const { return state_; }
  CacheViews views() const { return {attention_views_, state_views_}; }
  // Of the draft module; without memory when there is none.
  const AttentionCacheViews& draft() const { return draft_; }
  std::int64_t num_bytes() const { return num_bytes_; }

 private:
  // Memory for num_bytes bytes of `dtype`.
  void* allocate(std::int64_t num_bytes, DType dtype, const RunnerOptions& options);
  AttentionCacheViews allocate_pages(const FullAttentionSpec& spec, std::int64_t num_blocks,
                                     const RunnerOptions& options);

  std::vector<Buffer> buffers_;
  std::vector<ModelRunner::LayerKvCache> attention_;
  std::vector<ModelRunner::LayerStateCache> state_;
  std::vector<AttentionCacheViews> attention_views_;
  std::vector<StateCacheViews> state_views_;
  AttentionCacheViews draft_;
  std::int64_t num_bytes_ = 0;
};

}  // namespace deltaic

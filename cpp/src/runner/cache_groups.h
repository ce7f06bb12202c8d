#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <deltaic/runner.h>

namespace deltaic {

// What a runner makes of its KVCacheConfig: which group serves which layers of the model, and one spec a layer.
struct CacheGroups {
  int full_attn_group = -1;                        // the first full-attention group that is not marked as draft
  int gdn_group = -1;                              // -1: the model has no recurrent layers
  int draft_group = -1;                            // of the draft module; -1: no drafts are made
  std::vector<FullAttentionSpec> attention_specs;  // one a full-attention layer, in layer order
  std::vector<MambaSpec> state_specs;              // one a GDN layer
  FullAttentionSpec draft_spec;                    // with a draft group; its blocks have the ids of the target's
  std::int64_t fa_page_size_bytes = 0;             // of the group's spec
  int num_running_slots = 0;                       // 0 without GDN layers, like num_snapshot_slots
  int num_snapshot_slots = 0;
  std::vector<std::int64_t> block_table_row_strides;  // one a group
  std::vector<std::string> group_names;               // "group 0 (full attention)", for messages

  int block_size() const { return attention_specs.front().block_size; }
  int num_state_slots() const { return num_running_slots + num_snapshot_slots; }
};

// A group of recurrent layers, of one spec or of one a layer.
bool is_mamba_group(const KVCacheGroupSpec& group);

// Finds the groups and checks them against the model and the options. Throws InvalidArgument or Unsupported naming the
// group, the field and the numbers. With num_speculative_tokens, the next full-attention group is the draft module's;
// without it, none is. A model without a mamba group has full attention in every layer; its layer_kinds
// may be empty.
CacheGroups resolve_cache_groups(const ModelConfig& model, const KVCacheConfig& kv_cache, const RunnerOptions& options);

}  // namespace deltaic

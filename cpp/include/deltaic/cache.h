#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <deltaic/config.h>
#include <deltaic/tensor.h>

namespace deltaic {

// ---- what a cache looks like -------------------------------------------------------------------------------------

// K and V of one full-attention layer, in pages of block_size tokens.
struct FullAttentionSpec {
  int block_size = 16;  // tokens
  int num_kv_heads = 0;
  int head_size = 0;    // elements of a head of K
  int head_size_v = 0;  // of V; 0: head_size
  DType dtype = DType::f32;
  std::optional<std::int64_t> page_size_padded;  // bytes of a page with padding; none: no padding

  // block_size x num_kv_heads x (head_size + head_size_v) x sizeof(dtype), or the padded value. Throws
  // InvalidArgument when the padded value is below the real one.
  std::int64_t page_size_bytes() const;
  friend bool operator==(const FullAttentionSpec&, const FullAttentionSpec&) = default;
};

enum class MambaType : std::uint8_t { gdn, mamba2, short_conv };
// How states of prefixes are kept, in vLLM's words: plan_kv_cache says align with prefix caching, else none. The runner
// does the same in every mode.
enum class MambaCacheMode : std::uint8_t { none, align, all };

// The state tensors of one recurrent layer, for one slot.
struct MambaSpec {
  int block_size = 256;                           // tokens from one kept state to the next
  std::vector<std::vector<std::int64_t>> shapes;  // one a state tensor: of GDN, conv and then temporal
  std::vector<DType> dtypes;                      // one a state tensor
  MambaType mamba_type = MambaType::gdn;
  MambaCacheMode cache_mode = MambaCacheMode::none;
  int num_speculative_blocks = 0;                // drafts a step
  std::optional<std::int64_t> page_size_padded;  // likewise

  // Sum of the states' bytes, or the padded value; throws as FullAttentionSpec does.
  std::int64_t page_size_bytes() const;
  // What a running slot has beside its page, to repeat the tokens of a verified step: with num_speculative_blocks S, of
  // a GDN layer, 1 + S rows of f32. Throws InvalidArgument for shapes that are not those of such a layer.
  std::int64_t replay_bytes() const;
  friend bool operator==(const MambaSpec&, const MambaSpec&) = default;
};

// A group whose layers have different specs of one kind. A page holds the pages of all layers.
struct UniformTypeKVCacheSpecs {
  int block_size = 0;
  std::map<std::string, std::variant<FullAttentionSpec, MambaSpec>> layer_specs;

  std::int64_t page_size_bytes() const;
  std::int64_t replay_bytes() const;
  friend bool operator==(const UniformTypeKVCacheSpecs&, const UniformTypeKVCacheSpecs&) = default;
};

using KVCacheSpec = std::variant<FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs>;

struct KVCacheGroupSpec {
  std::vector<std::string> layer_names;  // "model.layers.3"
  KVCacheSpec spec;
  bool is_eagle_group = false;  // of a draft model
};

struct KVCacheConfig {
  std::int64_t num_blocks = 0;  // of each attention group, block 0 included
  std::vector<KVCacheGroupSpec> groups;
  std::optional<int> num_running_slots;  // state slots of requests that run, one each; none: max_num_reqs
  int num_snapshot_slots = 0;            // state slots of the prefix cache, numbered after the running ones
};

// ---- who owns which block and which snapshot slot ----------------------------------------------------------------

// What the prefix index knows of a request's tokens. Valid until the next call that changes the CacheManager.
struct PrefixHit {
  int num_tokens = 0;            // usable: both the K/V blocks and (with recurrent layers) a snapshot exist
  int num_attention_tokens = 0;  // tokens whose K/V blocks exist; >= num_tokens
  int snapshot_slot = -1;        // holds the state after num_tokens; -1 without a hit or without recurrent layers
};

struct CacheStats {
  std::int64_t num_queries = 0;       // admissions, with a hit or without
  std::int64_t num_query_tokens = 0;  // known tokens of the requests that were admitted
  std::int64_t num_hit_tokens = 0;    // of them, those that a hit gave
  std::int64_t num_evicted_blocks = 0;
  std::int64_t num_snapshots = 0;             // published
  std::int64_t num_evicted_snapshots = 0;     // to make room, or because their K/V blocks were evicted
  std::int64_t num_superseded_snapshots = 0;  // given up for a later one of the same request
};

// Owns the attention blocks and the snapshot slots of one engine, and the prefix index over both. It moves no
// bytes: callers turn what it returns into SchedulerOutput::state_copies. Not thread-safe; the scheduler owns it.
//
// Blocks are reference-counted. A block whose tokens are all known and computed is published under a hash of its
// whole prefix (and the request's cache salt); when its last owner frees it, it stays hittable until LRU eviction.
// A request's blocks are freed last block first, so the tail of a sequence is evicted before its head. Block 0 is never
// handed out, so the capacity is num_blocks - 1.
//
// Snapshots live as long as the block that ends at their token count is hittable, and at most until LRU eviction. A
// snapshot that a request takes of its own output (past the tokens of add_request) gives up the previous one of that
// kind, unless a request has hit that: a live request keeps one, and the last one outlives it for the next turn.
//
// Order on the device. A step runs its hit copies, then the forward, then its snapshot copies, and steps run in the
// order they are scheduled. So a slot that a hit of this step reads may be reserved again in this step (the read
// comes first), and what a step publishes may be hit from the next step on. Reserve all snapshots of a step before
// publishing any: a slot that is published may be evicted, and the step would write it twice.
class CacheManager {
 public:
  struct Options {
    std::int64_t num_blocks = 0;
    int block_size = 16;
    int mamba_block_size = 0;  // a multiple of block_size; 0: the model has no recurrent layers
    int num_snapshot_slots = 0;
    int first_snapshot_slot = 0;  // = KVCacheConfig::num_running_slots
    bool enable_prefix_caching = true;
  };
  // Throws InvalidArgument naming the option that is out of range.
  explicit CacheManager(const Options& options);
  ~CacheManager();
  CacheManager(CacheManager&&) noexcept;
  CacheManager& operator=(CacheManager&&) noexcept;

  // Registers a request and its known tokens (prompt, or prompt + output). Throws InvalidArgument for an id that is
  // registered already. The manager keeps its own copy of the tokens.
  void add_request(const std::string& req_id, std::span<const std::int32_t> token_ids,
                   std::string_view cache_salt = {});
  // Tokens that became known. Throws InvalidArgument for an unknown id (as all below, but remove_request).
  void append_tokens(const std::string& req_id, std::span<const std::int32_t> token_ids);
  // Frees what the request holds and forgets it. An unknown id is ignored.
  void remove_request(const std::string& req_id);

  // The longest usable prefix of the request's known tokens, at most their number - 1. Changes nothing.
  PrefixHit find_prefix(const std::string& req_id) const;
  // Takes the blocks of `hit` (as find_prefix just returned it; {} for none) and new ones, so that the request holds
  // blocks for num_tokens tokens. Returns all its block ids in token order; nullopt when too few can be had, and then
  // nothing has changed. Throws InvalidArgument for a hit that is stale or longer than num_tokens, and for a request
  // that is admitted already.
  std::optional<std::vector<int>> admit(const std::string& req_id, const PrefixHit& hit, int num_tokens);
  // Adds blocks so that the request holds blocks for num_tokens tokens; returns the new ids (often none); nullopt as
  // in admit. Throws InvalidArgument for a request that is not admitted.
  std::optional<std::vector<int>> extend(const std::string& req_id, int num_tokens);
  // Publishes the full blocks of the first num_computed_tokens tokens, known tokens only. Call it when the step that
  // computes them has been scheduled and no further request is admitted to that step. Throws InvalidArgument for more
  // tokens than the request holds blocks for.
  void publish(const std::string& req_id, int num_computed_tokens);
  // Gives back all blocks and cancels the reserved snapshots (a preemption, or the end); what was published stays
  // hittable. The tokens are kept.
  void release(const std::string& req_id);

  // A slot for the state after the request's first num_tokens tokens: a multiple of mamba_block_size, within the blocks
  // it holds; tokens that are not known yet (drafts, a step in flight) are fine. nullopt when the index has that
  // snapshot, another request has reserved it, or no slot can be evicted; the same slot again when asked again. Throws
  // InvalidArgument for a num_tokens that is neither.
  std::optional<int> reserve_snapshot(const std::string& req_id, int num_tokens);
  // Makes a reserved snapshot hittable. Its tokens must be known and their K/V blocks published. Throws
  // InvalidArgument where they are not, and without a reservation (as after release).
  void publish_snapshot(const std::string& req_id, int num_tokens);
  // Gives the slot back. Ignored without a reservation.
  void cancel_snapshot(const std::string& req_id, int num_tokens);

  // Blocks for num_tokens tokens can be had when nothing else runs.
  bool can_ever_fit(int num_tokens) const;
  std::int64_t num_free_blocks() const;    // free or evictable
  std::int64_t num_total_blocks() const;   // the capacity: num_blocks - 1
  int num_free_snapshot_slots() const;     // free or evictable
  std::int64_t num_cached_blocks() const;  // hittable, in use or not
  int num_cached_snapshots() const;        // hittable
  const Options& options() const;
  const CacheStats& stats() const;
  // Forgets all cached prefixes. Returns false, changing nothing, while a request holds blocks.
  bool reset_prefix_cache();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// ---- how memory is divided ----------------------------------------------------------------------------------------

struct MemoryPlanOptions {
  std::int64_t memory_bytes = 0;  // for caches
  int max_model_len = 0;
  int max_num_seqs = 0;
  int num_speculative_tokens = 0;
  bool with_draft_module = false;  // a further attention group for it, of the same blocks
  int block_size = 16;
  int mamba_block_size = 256;
  bool enable_prefix_caching = true;
  DType kv_dtype = DType::f32;
  DType conv_state_dtype = DType::f32;
  DType recurrent_state_dtype = DType::f32;
  std::optional<std::int64_t> num_blocks;  // overrides the division; snapshot slots then get all that remains
  std::optional<int> num_snapshot_slots;   // overrides it likewise
};

// The KV-cache groups of a model, without any division of memory (num_blocks is 0): one full-attention group, then
// one GDN group when the model has such layers, then that of the draft module. All attention groups share their blocks.
KVCacheConfig make_kv_cache_groups(const ModelConfig& model, const MemoryPlanOptions& options);

// Divides memory_bytes. First max_num_seqs running state slots with their replay rows, whatever the number of blocks;
// then the K/V blocks of one request of max_model_len (and block 0). Of what remains, snapshot slots get a quarter,
// though never more than one for each mamba_block_size tokens of K/V; attention blocks get the rest. Snapshot slots are
// 0 without prefix caching, without recurrent layers, or when max_model_len <= mamba_block_size (none could be hit).
// Without prefix caching there are no more blocks than max_num_seqs requests of max_model_len can use. When num_blocks
// and num_snapshot_slots are both given (num_blocks alone where there are no snapshots), memory_bytes 0 means that
// nothing is checked against it.
//
// Throws OutOfMemory with the numbers when not even one request of max_model_len fits, InvalidArgument for options out
// of range, Unsupported for a model without full attention.
KVCacheConfig plan_kv_cache(const ModelConfig& model, const MemoryPlanOptions& options);

// What a KVCacheConfig holds, for the start-up line and `deltaic info`.
struct CacheCapacity {
  std::int64_t num_tokens = 0;           // of K/V: (num_blocks - 1) x block_size
  double max_concurrency = 0.0;          // requests of max_model_len whose K/V fit at once
  std::int64_t kv_bytes = 0;             // of all attention blocks and layers, block 0 and the draft module included
  std::int64_t running_state_bytes = 0;  // with replay rows
  std::int64_t snapshot_bytes = 0;
};
// Throws InvalidArgument for max_model_len < 1, and where there is a GDN group and num_running_slots is not set.
CacheCapacity cache_capacity(const KVCacheConfig& config, int max_model_len);

}  // namespace deltaic

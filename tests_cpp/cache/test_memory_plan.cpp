#include <string>

#include <deltaic/cache.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

using namespace deltaic;

namespace {

// 6 GDN and 2 full-attention layers; a block of 16 tokens has 32 KiB over both, a state slot 6 x 143,360 bytes.
ModelConfig hybrid() {
  ModelConfig model;
  model.architecture = Architecture::qwen3_5;
  model.num_layers = 8;
  for (int layer = 0; layer < 8; ++layer)
    model.layer_kinds.push_back(layer % 4 == 3 ? LayerKind::full_attention : LayerKind::linear_attention);
  model.num_kv_heads = 2;
  model.head_dim = 64;
  model.linear_num_key_heads = 4;
  model.linear_num_value_heads = 8;
  model.linear_key_head_dim = 64;
  model.linear_value_head_dim = 64;
  model.linear_conv_kernel_dim = 4;
  return model;
}

ModelConfig dense() {
  ModelConfig model;
  model.num_layers = 4;  // and no layer_kinds
  model.num_kv_heads = 2;
  model.head_dim = 64;
  return model;
}

constexpr std::int64_t kBlock = 16 * 2 * 128 * 4 * 2;
constexpr std::int64_t kSlot = 6 * (1024 * 3 + 8 * 64 * 64) * 4;

MemoryPlanOptions options(std::int64_t memory_bytes) {
  MemoryPlanOptions o;
  o.memory_bytes = memory_bytes;
  o.max_model_len = 1024;
  o.max_num_seqs = 8;
  return o;
}

std::int64_t bytes(const KVCacheConfig& config) {
  return config.num_blocks * kBlock + (*config.num_running_slots + config.num_snapshot_slots) * kSlot;
}

}  // namespace

TEST_CASE("the groups name their layers and say what a page holds") {
  MemoryPlanOptions o = options(0);
  o.num_speculative_tokens = 2;
  o.kv_dtype = DType::bf16, o.conv_state_dtype = DType::bf16;
  const KVCacheConfig config = make_kv_cache_groups(hybrid(), o);
  CHECK(config.num_blocks == 0);
  REQUIRE(config.groups.size() == 2);
  CHECK(config.groups[0].layer_names == std::vector<std::string>{"model.layers.3", "model.layers.7"});
  CHECK(config.groups[1].layer_names.size() == 6);
  const auto& attention = std::get<FullAttentionSpec>(config.groups[0].spec);
  CHECK(attention.page_size_bytes() == 16 * 2 * 128 * 2);
  const auto& mamba = std::get<MambaSpec>(config.groups[1].spec);
  CHECK(mamba.shapes == std::vector<std::vector<std::int64_t>>{{1024, 3 + 2}, {8, 64, 64}});
  CHECK(mamba.dtypes == std::vector{DType::bf16, DType::f32});
  CHECK(mamba.num_speculative_blocks == 2);
  CHECK(mamba.cache_mode == MambaCacheMode::align);

  const KVCacheConfig attention_only = make_kv_cache_groups(dense(), o);
  REQUIRE(attention_only.groups.size() == 1);
  CHECK(attention_only.groups[0].layer_names.size() == 4);
}

TEST_CASE("a draft module has a group of its own, whose blocks come out of the same memory") {
  for (const ModelConfig& model : {hybrid(), dense()}) {
    MemoryPlanOptions o = options(200 << 20);
    const KVCacheConfig without = plan_kv_cache(model, o);
    o.with_draft_module = true;
    const KVCacheConfig config = plan_kv_cache(model, o);
    REQUIRE(config.groups.size() == without.groups.size() + 1);
    const KVCacheGroupSpec& draft = config.groups.back();
    CHECK(draft.layer_names == std::vector<std::string>{"mtp.layers.0"});
    CHECK(draft.is_eagle_group);
    CHECK(draft.spec == config.groups[0].spec);
    CHECK(config.num_running_slots == without.num_running_slots);
    CHECK(config.num_blocks < without.num_blocks);
    const CacheCapacity capacity = cache_capacity(config, o.max_model_len);
    const std::int64_t layers = static_cast<std::int64_t>(config.groups[0].layer_names.size()) + 1;
    CHECK(capacity.kv_bytes == config.num_blocks * layers * 16 * 2 * 128 * 4);
    CHECK(capacity.num_tokens == (config.num_blocks - 1) * 16);
    CHECK(capacity.kv_bytes + capacity.running_state_bytes + capacity.snapshot_bytes <= o.memory_bytes);
  }
}

TEST_CASE("the plan uses the memory and stays within it") {
  for (const std::int64_t mib : {12, 16, 17, 40, 64, 100, 1000, 20'000}) {
    CAPTURE(mib);
    const KVCacheConfig config = plan_kv_cache(hybrid(), options(mib << 20));
    CHECK(bytes(config) <= mib << 20);
    CHECK(bytes(config) > (mib << 20) - kBlock);
    CHECK(config.num_blocks > 1024 / 16);
    CHECK(config.num_running_slots == 8);
  }
}

TEST_CASE("running states come first, the K/V of one request next, and a quarter of the rest goes to snapshots") {
  const std::int64_t rest = 100 * kSlot;
  const KVCacheConfig config = plan_kv_cache(hybrid(), options(8 * kSlot + 65 * kBlock + rest));
  CHECK(config.num_snapshot_slots == 25);
  CHECK(config.num_blocks == 65 + 75 * kSlot / kBlock);

  // A tiny state: no more snapshots than boundaries in the cached tokens.
  ModelConfig small_state = hybrid();
  small_state.linear_num_key_heads = 1, small_state.linear_num_value_heads = 1;
  small_state.linear_key_head_dim = 2, small_state.linear_value_head_dim = 2;
  const KVCacheConfig capped = plan_kv_cache(small_state, options(std::int64_t{64} << 20));
  CHECK(capped.num_snapshot_slots > 0);
  CHECK(capped.num_snapshot_slots <= (capped.num_blocks - 1) * 16 / 256);
}

TEST_CASE("state memory is a function of max_num_seqs, never of the number of blocks") {
  MemoryPlanOptions o = options(0);
  o.num_snapshot_slots = 0;
  for (const int num_seqs : {1, 8, 32})
    for (const int num_drafts : {0, 3})
      for (const std::int64_t num_blocks : {65, 1000, 100'000}) {
        o.max_num_seqs = num_seqs, o.num_speculative_tokens = num_drafts, o.num_blocks = num_blocks;
        const KVCacheConfig config = plan_kv_cache(hybrid(), o);
        CHECK(config.num_blocks == num_blocks);
        CHECK(config.num_running_slots == num_seqs);
        const std::int64_t replay = num_drafts > 0 ? (1 + num_drafts) * ((1024 - 8 * 64) / 2 + 8 * 64 + 8) : 0;
        CHECK(cache_capacity(config, 1024).running_state_bytes ==
              std::int64_t{num_seqs} * 6 * (1024 * (3 + num_drafts) + 8 * 64 * 64 + replay) * 4);
      }
}

TEST_CASE("with drafts, the sequences that fit are those that fit with their replay rows") {
  MemoryPlanOptions o = options(0);
  o.num_speculative_tokens = 3;
  const std::int64_t running_bytes = 6 * (1024 * 6 + 8 * 64 * 64 + 4 * (256 + 512 + 8)) * 4;
  o.memory_bytes = 5 * running_bytes + 65 * kBlock;
  CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o), doctest::Contains("lower max_num_seqs to 5, or"), OutOfMemory);
  o.max_num_seqs = 5;
  CHECK(plan_kv_cache(hybrid(), o).num_running_slots == 5);
  o.memory_bytes -= 1;
  CHECK_THROWS_AS(plan_kv_cache(hybrid(), o), OutOfMemory);
}

TEST_CASE("no snapshot slots where none could be hit") {
  MemoryPlanOptions o = options(std::int64_t{64} << 20);
  CHECK(plan_kv_cache(dense(), o).num_snapshot_slots == 0);
  CHECK(plan_kv_cache(dense(), o).num_running_slots == 0);
  o.max_model_len = 257;
  CHECK(plan_kv_cache(hybrid(), o).num_snapshot_slots > 0);
  o.max_model_len = 256;
  CHECK(plan_kv_cache(hybrid(), o).num_snapshot_slots == 0);
  o.max_model_len = 1024, o.enable_prefix_caching = false;
  const KVCacheConfig config = plan_kv_cache(hybrid(), o);
  CHECK(config.num_snapshot_slots == 0);
  CHECK(config.num_blocks == 1 + 8 * 64);  // more could not be used
  CHECK(std::get<MambaSpec>(config.groups[1].spec).cache_mode == MambaCacheMode::none);
}

TEST_CASE("given numbers override the division, and must fit") {
  MemoryPlanOptions o = options(100 * kSlot);
  o.num_snapshot_slots = 10;
  KVCacheConfig config = plan_kv_cache(hybrid(), o);
  CHECK(config.num_snapshot_slots == 10);
  CHECK(config.num_blocks == 82 * kSlot / kBlock);
  o.num_snapshot_slots = {}, o.num_blocks = 1000;
  config = plan_kv_cache(hybrid(), o);
  CHECK(config.num_blocks == 1000);
  CHECK(config.num_snapshot_slots == (92 * kSlot - 1000 * kBlock) / kSlot);
  o.num_blocks = 300;
  CHECK(plan_kv_cache(hybrid(), o).num_snapshot_slots == 299 * 16 / 256);
  o.num_snapshot_slots = 60;
  CHECK(plan_kv_cache(hybrid(), o).num_snapshot_slots == 60);
  o.num_snapshot_slots = 90;
  CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o),
                       doctest::Contains("lower num_blocks or num_snapshot_slots, or give more memory"), OutOfMemory);
  o.memory_bytes = 0;  // all numbers are given
  CHECK(plan_kv_cache(hybrid(), o).num_snapshot_slots == 90);
}

TEST_CASE("memory that is too small is refused with the numbers and what would fit") {
  MemoryPlanOptions o = options(8 * kSlot + 64 * kBlock);
  CHECK_THROWS_WITH_AS(
      plan_kv_cache(hybrid(), o),
      "the caches need 9011200 bytes, memory_bytes is 8978432: 6881280 for 8 running states (max_num_seqs 8, "
      "num_speculative_tokens 0), 2129920 for 65 blocks of 16 tokens, 0 for 0 snapshots; one request of max_model_len "
      "1024 takes 64 blocks and block 0 is never handed out: lower max_model_len to 1008, lower max_num_seqs to 7, or "
      "give more memory",
      OutOfMemory);
  MemoryPlanOptions shorter = o, fewer = o;
  shorter.max_model_len = 1008;
  CHECK_NOTHROW(plan_kv_cache(hybrid(), shorter));
  fewer.max_num_seqs = 7;
  CHECK_NOTHROW(plan_kv_cache(hybrid(), fewer));
  o.memory_bytes = 1000;
  CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o),
                       doctest::Contains("give more memory, or lower max_model_len and max_num_seqs"), OutOfMemory);
}

TEST_CASE("D66: max_num_seqs beyond the memory is an error that names both numbers") {
  MemoryPlanOptions o = options(969 * kSlot + 65 * kBlock);
  o.max_num_seqs = 1024;
  CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o), doctest::Contains("1024 running states (max_num_seqs 1024"),
                       OutOfMemory);
  CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o), doctest::Contains("lower max_num_seqs to 969,"), OutOfMemory);
  o.max_num_seqs = 969;
  CHECK(plan_kv_cache(hybrid(), o).num_running_slots == 969);
}

TEST_CASE("D74: 64 blocks of 16 hold 1008 tokens, not 1024") {
  MemoryPlanOptions o = options(0);
  o.num_blocks = 64;
  CHECK_THROWS_WITH_AS(plan_kv_cache(dense(), o),
                       "num_blocks 64 holds 1008 tokens (block 0 is never handed out), max_model_len is 1024: raise "
                       "num_blocks to 65 or lower max_model_len",
                       OutOfMemory);
  o.max_model_len = 1008;
  CHECK(plan_kv_cache(dense(), o).num_blocks == 64);
  o.max_model_len = 512, o.num_blocks = 32;
  CHECK_THROWS_AS(plan_kv_cache(dense(), o), OutOfMemory);
  o.num_blocks = 33;
  CHECK(plan_kv_cache(dense(), o).num_blocks == 33);
}

TEST_CASE("D75: the reported concurrency counts the blocks of one pool, drafts or not") {
  for (const int num_drafts : {0, 3}) {
    MemoryPlanOptions o = options(0);
    o.num_speculative_tokens = num_drafts;
    o.num_blocks = 1 + 5 * 64 + 32, o.num_snapshot_slots = 4;
    const KVCacheConfig config = plan_kv_cache(hybrid(), o);
    const CacheCapacity capacity = cache_capacity(config, o.max_model_len);
    CHECK(capacity.num_tokens == 352 * 16);
    CHECK(capacity.max_concurrency == 5.5);
    CHECK(capacity.kv_bytes == config.num_blocks * kBlock);
    const std::int64_t slot_bytes = 6 * (1024 * (3 + num_drafts) + 8 * 64 * 64) * 4;
    const std::int64_t replay_bytes = num_drafts > 0 ? 6 * (1 + num_drafts) * (256 + 512 + 8) * 4 : 0;
    CHECK(capacity.snapshot_bytes == 4 * slot_bytes);
    CHECK(capacity.running_state_bytes == 8 * (slot_bytes + replay_bytes));
  }
}

TEST_CASE("plan options out of range are refused by name") {
  const auto refuses = [](const char* message, auto change) {
    MemoryPlanOptions o = options(std::int64_t{64} << 20);
    change(o);
    CHECK_THROWS_WITH_AS(plan_kv_cache(hybrid(), o), message, InvalidArgument);
  };
  refuses("memory_bytes is -1, want at least 0", [](auto& o) { o.memory_bytes = -1; });
  refuses("max_model_len is 0, want at least 1", [](auto& o) { o.max_model_len = 0; });
  refuses("max_num_seqs is 0, want at least 1", [](auto& o) { o.max_num_seqs = 0; });
  refuses("num_speculative_tokens is -1, want at least 0", [](auto& o) { o.num_speculative_tokens = -1; });
  refuses("block_size is 0, want at least 1", [](auto& o) { o.block_size = 0; });
  refuses("mamba_block_size is 100, want a multiple of block_size 16", [](auto& o) { o.mamba_block_size = 100; });
  refuses("num_blocks is 1, want 2 to 2147483646 (block 0 is never handed out)", [](auto& o) { o.num_blocks = 1; });
  refuses("num_snapshot_slots is -1, want at least 0", [](auto& o) { o.num_snapshot_slots = -1; });
  refuses("num_snapshot_slots is 3, which needs enable_prefix_caching",
          [](auto& o) { o.num_snapshot_slots = 3, o.enable_prefix_caching = false; });
  ModelConfig linear = hybrid();
  linear.layer_kinds.assign(8, LayerKind::linear_attention);
  CHECK_THROWS_AS(make_kv_cache_groups(linear, options(0)), Unsupported);
}

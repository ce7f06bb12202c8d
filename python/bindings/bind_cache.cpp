#include <deltaic/cache.h>
#include <pybind11/stl.h>

#include "python/bindings/module.h"
#include "python/bindings/struct.h"

using namespace deltaic;

namespace {

void bind_specs(py::module_& m) {
  Struct<FullAttentionSpec>(m, "FullAttentionSpec",
                            "K and V of one full-attention layer, in pages of block_size tokens.")
      .field("block_size", &FullAttentionSpec::block_size)
      .field("num_kv_heads", &FullAttentionSpec::num_kv_heads)
      .field("head_size", &FullAttentionSpec::head_size)
      .field("head_size_v", &FullAttentionSpec::head_size_v)
      .field("dtype", &FullAttentionSpec::dtype)
      .field("page_size_padded", &FullAttentionSpec::page_size_padded)
      .class_object()
      .def("page_size_bytes", &FullAttentionSpec::page_size_bytes);
  py::enum_<MambaType>(m, "MambaType")
      .value("gdn", MambaType::gdn)
      .value("mamba2", MambaType::mamba2)
      .value("short_conv", MambaType::short_conv);
  py::enum_<MambaCacheMode>(m, "MambaCacheMode")
      .value("none", MambaCacheMode::none)
      .value("align", MambaCacheMode::align)
      .value("all", MambaCacheMode::all);
  Struct<MambaSpec>(m, "MambaSpec", "The state tensors of one recurrent layer, for one slot.")
      .field("block_size", &MambaSpec::block_size)
      .field("shapes", &MambaSpec::shapes)
      .field("dtypes", &MambaSpec::dtypes)
      .field("mamba_type", &MambaSpec::mamba_type)
      .field("cache_mode", &MambaSpec::cache_mode)
      .field("num_speculative_blocks", &MambaSpec::num_speculative_blocks)
      .field("page_size_padded", &MambaSpec::page_size_padded)
      .class_object()
      .def(
          "__eq__", [](const MambaSpec& a, const MambaSpec& b) { return a == b; }, py::is_operator())
      .def("__hash__",  // specs are keys of deltaic.mamba.get_mamba_groups: do not change one that is
           [](const MambaSpec& self) {
             return py::hash(py::make_tuple(self.block_size, self.num_speculative_blocks,
                                            static_cast<int>(self.mamba_type), self.page_size_bytes()));
           })
      .def("page_size_bytes", &MambaSpec::page_size_bytes)
      .def("replay_bytes", &MambaSpec::replay_bytes, "Bytes of a running slot beside its page, for drafts.");
  Struct<UniformTypeKVCacheSpecs>(m, "UniformTypeKVCacheSpecs",
                                  "A group whose layers have different specs of one kind.")
      .field("block_size", &UniformTypeKVCacheSpecs::block_size)
      .field("layer_specs", &UniformTypeKVCacheSpecs::layer_specs)
      .class_object()
      .def("page_size_bytes", &UniformTypeKVCacheSpecs::page_size_bytes);
  Struct<KVCacheGroupSpec>(m, "KVCacheGroupSpec", "Layers whose caches share block ids.")
      .field("layer_names", &KVCacheGroupSpec::layer_names)
      .field("spec", &KVCacheGroupSpec::spec)
      .field("is_eagle_group", &KVCacheGroupSpec::is_eagle_group);
  Struct<KVCacheConfig>(m, "KVCacheConfig", "The caches of one runner.")
      .field("num_blocks", &KVCacheConfig::num_blocks)
      .field("groups", &KVCacheConfig::groups)
      .field("num_running_slots", &KVCacheConfig::num_running_slots)
      .field("num_snapshot_slots", &KVCacheConfig::num_snapshot_slots);
}

void bind_manager(py::module_& m) {
  Struct<PrefixHit>(m, "PrefixHit", "What the prefix index knows of a request's tokens.")
      .field("num_tokens", &PrefixHit::num_tokens)
      .field("num_attention_tokens", &PrefixHit::num_attention_tokens)
      .field("snapshot_slot", &PrefixHit::snapshot_slot);
  Struct<CacheStats>(m, "CacheStats", "Counters of a CacheManager since it was made.")
      .field("num_queries", &CacheStats::num_queries)
      .field("num_query_tokens", &CacheStats::num_query_tokens)
      .field("num_hit_tokens", &CacheStats::num_hit_tokens)
      .field("num_evicted_blocks", &CacheStats::num_evicted_blocks)
      .field("num_snapshots", &CacheStats::num_snapshots)
      .field("num_evicted_snapshots", &CacheStats::num_evicted_snapshots)
      .field("num_superseded_snapshots", &CacheStats::num_superseded_snapshots);
  Struct<CacheManager::Options>(m, "CacheManagerOptions", "The sizes of a CacheManager.")
      .field("num_blocks", &CacheManager::Options::num_blocks)
      .field("block_size", &CacheManager::Options::block_size)
      .field("mamba_block_size", &CacheManager::Options::mamba_block_size)
      .field("num_snapshot_slots", &CacheManager::Options::num_snapshot_slots)
      .field("first_snapshot_slot", &CacheManager::Options::first_snapshot_slot)
      .field("enable_prefix_caching", &CacheManager::Options::enable_prefix_caching);
  using Tokens = std::vector<std::int32_t>;
  py::class_<CacheManager>(m, "CacheManager",
                           "Owns attention blocks and snapshot slots, and the prefix index over both.")
      .def(py::init<const CacheManager::Options&>(), py::arg("options"))
      .def(
          "add_request",
          [](CacheManager& self, const std::string& req_id, const Tokens& token_ids, const std::string& cache_salt) {
            self.add_request(req_id, token_ids, cache_salt);
          },
          py::arg("req_id"), py::arg("token_ids"), py::arg("cache_salt") = "")
      .def(
          "append_tokens",
          [](CacheManager& self, const std::string& req_id, const Tokens& token_ids) {
            self.append_tokens(req_id, token_ids);
          },
          py::arg("req_id"), py::arg("token_ids"))
      .def("remove_request", &CacheManager::remove_request, py::arg("req_id"))
      .def("find_prefix", &CacheManager::find_prefix, py::arg("req_id"))
      .def("admit", &CacheManager::admit, py::arg("req_id"), py::arg("hit"), py::arg("num_tokens"))
      .def("extend", &CacheManager::extend, py::arg("req_id"), py::arg("num_tokens"))
      .def("publish", &CacheManager::publish, py::arg("req_id"), py::arg("num_computed_tokens"))
      .def("release", &CacheManager::release, py::arg("req_id"))
      .def("reserve_snapshot", &CacheManager::reserve_snapshot, py::arg("req_id"), py::arg("num_tokens"))
      .def("publish_snapshot", &CacheManager::publish_snapshot, py::arg("req_id"), py::arg("num_tokens"))
      .def("cancel_snapshot", &CacheManager::cancel_snapshot, py::arg("req_id"), py::arg("num_tokens"))
      .def("can_ever_fit", &CacheManager::can_ever_fit, py::arg("num_tokens"))
      .def_property_readonly("num_free_blocks", &CacheManager::num_free_blocks)
      .def_property_readonly("num_total_blocks", &CacheManager::num_total_blocks)
      .def_property_readonly("num_free_snapshot_slots", &CacheManager::num_free_snapshot_slots)
      .def_property_readonly("num_cached_blocks", &CacheManager::num_cached_blocks)
      .def_property_readonly("num_cached_snapshots", &CacheManager::num_cached_snapshots)
      .def_property_readonly("options", &CacheManager::options)
      .def_property_readonly("stats", &CacheManager::stats)
      .def("reset_prefix_cache", &CacheManager::reset_prefix_cache);
}

void bind_plan(py::module_& m) {
  Struct<MemoryPlanOptions>(m, "MemoryPlanOptions", "What plan_kv_cache divides, and for what.")
      .field("memory_bytes", &MemoryPlanOptions::memory_bytes)
      .field("max_model_len", &MemoryPlanOptions::max_model_len)
      .field("max_num_seqs", &MemoryPlanOptions::max_num_seqs)
      .field("num_speculative_tokens", &MemoryPlanOptions::num_speculative_tokens)
      .field("with_draft_module", &MemoryPlanOptions::with_draft_module)
      .field("block_size", &MemoryPlanOptions::block_size)
      .field("mamba_block_size", &MemoryPlanOptions::mamba_block_size)
      .field("enable_prefix_caching", &MemoryPlanOptions::enable_prefix_caching)
      .field("kv_dtype", &MemoryPlanOptions::kv_dtype)
      .field("conv_state_dtype", &MemoryPlanOptions::conv_state_dtype)
      .field("recurrent_state_dtype", &MemoryPlanOptions::recurrent_state_dtype)
      .field("num_blocks", &MemoryPlanOptions::num_blocks)
      .field("num_snapshot_slots", &MemoryPlanOptions::num_snapshot_slots);
  Struct<CacheCapacity>(m, "CacheCapacity", "What a KVCacheConfig holds.")
      .field("num_tokens", &CacheCapacity::num_tokens)
      .field("max_concurrency", &CacheCapacity::max_concurrency)
      .field("kv_bytes", &CacheCapacity::kv_bytes)
      .field("running_state_bytes", &CacheCapacity::running_state_bytes)
      .field("snapshot_bytes", &CacheCapacity::snapshot_bytes);
  m.def("cache_capacity", &cache_capacity, py::arg("config"), py::arg("max_model_len"),
        "What a KVCacheConfig holds, in tokens, requests and bytes.");
  m.def("make_kv_cache_groups", &make_kv_cache_groups, py::arg("model"), py::arg("options"),
        "The KV-cache groups of a model, without any division of memory.");
  m.def("plan_kv_cache", &plan_kv_cache, py::arg("model"), py::arg("options"),
        "Divide memory between running state slots, attention blocks and snapshot slots.");
}

}  // namespace

void bind_cache(py::module_& m) {
  bind_specs(m);
  bind_manager(m);
  bind_plan(m);
}

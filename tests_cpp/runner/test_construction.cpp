#include <doctest/doctest.h>

#include <cmath>

#include <deltaic/error.h>

#include "tests_cpp/runner/driver.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

KVCacheConfig with_groups(const KVCacheConfig& config, std::vector<KVCacheGroupSpec> groups) {
  KVCacheConfig result = config;
  result.groups = std::move(groups);
  return result;
}

// The message of the error that the construction ends with.
template <class Error>
std::string refusal(const TinyModel& model, const KVCacheConfig& config,
                    const RunnerOptions& options = small_options()) {
  try {
    ModelRunner(model.config, model.tensors, config, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error of that kind";
}

}  // namespace

TEST_CASE("the target group is the first full-attention group that is not marked as draft") {
  const TinyModel model = tiny_qwen3_5();
  const KVCacheConfig plain = cache_config(model.config);
  const auto target = plain.groups[0];
  const auto gdn = plain.groups[1];
  const auto make = [&](std::vector<KVCacheGroupSpec> groups) {
    return ModelRunner(model.config, model.tensors, with_groups(plain, std::move(groups)), small_options());
  };
  SUBCASE("a marked draft group in front is passed over") {
    const ModelRunner runner = make({draft_group(model.config, true), target, gdn});
    CHECK(runner.full_attn_group_id() == 1);
    CHECK(runner.gdn_group_id() == 2);
  }
  SUBCASE("the mamba group may come first") {
    const ModelRunner runner = make({gdn, target});
    CHECK(runner.full_attn_group_id() == 1);
    CHECK(runner.gdn_group_id() == 0);
  }
  SUBCASE("without one it is refused") {
    CHECK(refusal<InvalidArgument>(model, with_groups(plain, {draft_group(model.config, true), gdn})) ==
          "the KV-cache config has 2 groups and none is a full-attention group of the target model");
  }
}

TEST_CASE("with a draft model's group, marked or unmarked, the target stays group 0 and GDN group 1") {
  const TinyModel model = tiny_qwen3_5();
  for (const bool is_marked : {true, false}) {
    CAPTURE(is_marked);
    KVCacheConfig config = cache_config(model.config);
    config.groups.push_back(draft_group(model.config, is_marked));
    Engine engine(ModelRunner(model.config, model.tensors, config, small_options()));
    CHECK(engine.runner.full_attn_group_id() == 0);
    CHECK(engine.runner.gdn_group_id() == 1);
    CHECK(engine.runner.attn_kv().size() == 1);
    CHECK(engine.runner.attn_kv()[0].k.shape[2] == model.config.num_kv_heads);
    engine.add("a", prompt_of(7, 1));
    CHECK(engine.generate("a", 4) == dense_greedy(engine.runner, prompt_of(7, 1), 4));
  }
}

TEST_CASE("without a mamba group every layer is full attention; layer_types may be empty; no GDN state is allocated") {
  TinyModel model = tiny_qwen3();
  model.config.layer_kinds.clear();
  Engine engine(make_runner(model));
  CHECK(engine.runner.gdn_group_id() == -1);
  CHECK(engine.runner.gdn_state().empty());
  CHECK(engine.runner.num_state_slots() == 0);
  CHECK(engine.runner.attn_kv().size() == 4);
  engine.add("a", prompt_of(5, 1));
  CHECK(engine.generate("a", 3) == dense_greedy(engine.runner, prompt_of(5, 1), 3));
  CHECK(engine.runner.gdn_state_slots().empty());
}

TEST_CASE("attention page size comes from the spec, never from the model config") {
  const TinyModel model = tiny_qwen3_5();
  SUBCASE("a default spec gives exactly 2 x block x heads x head_size x sizeof(dtype)") {
    const ModelRunner runner = make_runner(model, {.block_size = 8, .kv_dtype = DType::bf16});
    CHECK(runner.fa_page_size_bytes() == 2 * 8 * 2 * 8 * 2);
    CHECK(runner.attn_kv()[0].k.dtype == DType::bf16);
    CHECK(runner.attn_kv()[0].v.dtype == DType::bf16);
    CHECK(runner.attn_kv()[0].k.stride[0] * 2 == runner.fa_page_size_bytes());
  }
  SUBCASE("a padded spec gives the padded size, honoured as the block stride") {
    Engine engine(make_runner(model, {.block_size = 4, .page_size_padded = 1024}));
    CHECK(engine.runner.fa_page_size_bytes() == 1024);
    const auto& cache = engine.runner.attn_kv()[0];
    CHECK(cache.k.stride[0] * 4 == 1024);
    CHECK(cache.v.stride[0] * 4 == 1024);
    engine.add("a", prompt_of(9, 1));
    CHECK(engine.generate("a", 6) == dense_greedy(engine.runner, prompt_of(9, 1), 6));
    // The padding behind the page of a used block was never written.
    const int block = static_cast<int>(engine.runner.last_attn_meta().block_table[0]);
    const std::vector<float> page = host_row<float>(cache.k, block);
    CHECK(std::isfinite(page[0]));
    for (std::size_t i = 2 * 4 * 2 * 8; i < 256; ++i) CHECK(std::isnan(page[i]));
  }
  SUBCASE("a padded size below the real one is refused") {
    CHECK(refusal<InvalidArgument>(model, cache_config(model.config, {.page_size_padded = 8})) !=
          "no error of that kind");
  }
}

TEST_CASE("one paged KV cache per full-attention layer, one state cache per GDN layer") {
  const TinyModel model = tiny_qwen3_5();
  const ModelRunner runner = make_runner(model, {.block_size = 4, .num_blocks = 10, .num_speculative_tokens = 0});
  CHECK(runner.num_blocks() == 10);
  REQUIRE(runner.attn_kv().size() == 1);
  CHECK(runner.attn_kv()[0].layer == 3);
  const auto& k = runner.attn_kv()[0].k;
  CHECK(std::vector(k.shape.begin(), k.shape.begin() + k.rank) == std::vector<std::int64_t>{10, 4, 2, 8});
  REQUIRE(runner.gdn_state().size() == 3);
  CHECK(runner.gdn_state()[0].layer == 0);
  CHECK(runner.gdn_state()[2].layer == 2);
  const auto& conv = runner.gdn_state()[0].conv;
  const auto& temporal = runner.gdn_state()[0].temporal;
  CHECK(std::vector(conv.shape.begin(), conv.shape.begin() + conv.rank) == std::vector<std::int64_t>{8, 64, 3});
  CHECK(std::vector(temporal.shape.begin(), temporal.shape.begin() + temporal.rank) ==
        std::vector<std::int64_t>{8, 4, 8, 8});
  CHECK(runner.cache_bytes() == 10 * runner.fa_page_size_bytes() + 3 * 8 * (64 * 3 + 4 * 8 * 8) * 4);
}

TEST_CASE("any pair of f32, bf16, f16 is allocatable, and a row of both states together is the spec's page") {
  const TinyModel model = tiny_qwen3_5();
  for (const DType conv : {DType::f32, DType::bf16, DType::f16})
    for (const DType temporal : {DType::f32, DType::bf16, DType::f16}) {
      CAPTURE(name(conv));
      CAPTURE(name(temporal));
      Engine engine(make_runner(model, {.conv_dtype = conv, .temporal_dtype = temporal}));
      const auto& state = engine.runner.gdn_state()[0];
      CHECK(state.conv.dtype == conv);
      CHECK(state.temporal.dtype == temporal);
      const auto spec = std::get<MambaSpec>(engine.runner.kv_cache_config().groups[1].spec);
      CHECK(state.conv.slice(0, 1).num_bytes() + state.temporal.slice(0, 1).num_bytes() ==
            static_cast<std::size_t>(spec.page_size_bytes()));
      engine.add("a", prompt_of(6, 1));
      CHECK(engine.generate("a", 1) == dense_greedy(engine.runner, prompt_of(6, 1), 1));
    }
}

TEST_CASE("padding of a mamba page is honoured as the slot stride") {
  const TinyModel model = tiny_qwen3_5();
  KVCacheConfig config = cache_config(model.config);
  auto& spec = std::get<MambaSpec>(config.groups[1].spec);
  spec.page_size_padded = spec.page_size_bytes() + 64;
  Engine engine(ModelRunner(model.config, model.tensors, config, small_options()));
  const auto& state = engine.runner.gdn_state()[1];
  CHECK((state.conv.stride[0] + state.temporal.stride[0]) * 4 == *spec.page_size_padded);
  engine.add("a", prompt_of(6, 1)), engine.add("b", prompt_of(3, 2));
  CHECK(engine.generate("a", 4) == dense_greedy(engine.runner, prompt_of(6, 1), 4));
  CHECK(engine.generate("b", 4) == dense_greedy(engine.runner, prompt_of(3, 2), 4));
}

TEST_CASE("state slots are sized by the number of live sequences, never by the number of KV blocks") {
  const TinyModel model = tiny_qwen3_5();
  const auto slots = [&](const CacheChoice& choice, std::optional<int> num_running_slots = std::nullopt) {
    RunnerOptions options = small_options();
    options.max_num_reqs = 3;
    options.num_speculative_tokens = choice.num_speculative_tokens;
    KVCacheConfig config = cache_config(model.config, choice);
    config.num_running_slots = num_running_slots;
    return ModelRunner(model.config, model.tensors, config, options).num_state_slots();
  };
  CHECK(slots({.num_blocks = 4}) == 3);
  CHECK(slots({.num_blocks = 4000}) == 3);
  if (!on_cuda()) CHECK(slots({.num_speculative_tokens = 2}) == 3);
  CHECK(slots({.num_snapshot_slots = 5}) == 8);
  CHECK(slots({.num_snapshot_slots = 5}, 2) == 7);
}

TEST_CASE("with S speculative tokens the conv state is [slots, conv_dim, K - 1 + S] and results stay right") {
  if (on_cuda()) return;  // it has none
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.num_speculative_tokens = 2;
  Engine engine(make_runner(model, {.num_speculative_tokens = 2}, options));
  CHECK(engine.runner.gdn_state()[0].conv.shape[2] == 5);
  engine.add("a", prompt_of(6, 1)), engine.add("b", prompt_of(3, 2));
  CHECK(engine.generate("a", 5) == dense_greedy(engine.runner, prompt_of(6, 1), 5));
  CHECK(engine.generate("b", 5) == dense_greedy(engine.runner, prompt_of(3, 2), 5));
  CHECK(engine.runner.gdn_state_slots() == std::map<std::string, int>{{"a", 0}, {"b", 1}});
}

TEST_CASE("layers of one group may have specs of their own") {
  const TinyModel model = tiny_qwen3_5();
  KVCacheConfig config = cache_config(model.config);
  const auto spec = std::get<MambaSpec>(config.groups[1].spec);
  UniformTypeKVCacheSpecs uniform;
  uniform.block_size = spec.block_size;
  for (const std::string& layer : config.groups[1].layer_names) uniform.layer_specs.emplace(layer, spec);
  std::get<MambaSpec>(uniform.layer_specs.at("model.layers.2")).dtypes[1] = DType::bf16;
  config.groups[1].spec = uniform;
  const ModelRunner runner(model.config, model.tensors, config, small_options());
  CHECK(runner.gdn_state()[0].temporal.dtype == DType::f32);
  CHECK(runner.gdn_state()[2].temporal.dtype == DType::bf16);
}

TEST_CASE("what cannot be allocated or run is refused by name at construction") {
  const TinyModel model = tiny_qwen3_5();
  const KVCacheConfig good = cache_config(model.config);
  const auto attention = [&](auto change) {
    KVCacheConfig config = good;
    change(std::get<FullAttentionSpec>(config.groups[0].spec));
    return config;
  };
  const auto gdn = [&](auto change) {
    KVCacheConfig config = good;
    change(std::get<MambaSpec>(config.groups[1].spec));
    return config;
  };
  CHECK(refusal<InvalidArgument>(model, attention([](auto& spec) { spec.block_size = 0; })) ==
        "KV-cache group 0 (full attention): block_size is 0, at least 1 is needed");
  CHECK(refusal<Unsupported>(model, attention([](auto& spec) { spec.head_size_v = 16; })) ==
        "KV-cache group 0 (full attention): head_size_v is 16 but head_size is 8; V heads of another size than K heads "
        "are "
        "not supported");
  CHECK(refusal<InvalidArgument>(model, attention([](auto& spec) { spec.num_kv_heads = 4; })) ==
        "KV-cache group 0 (full attention): num_kv_heads is 4, the model has 2");
  CHECK(refusal<InvalidArgument>(model, attention([](auto& spec) { spec.head_size = 4; })) ==
        "KV-cache group 0 (full attention): head_size is 4, the model has 8");
  CHECK(refusal<InvalidArgument>(model, attention([](auto& spec) { spec.dtype = DType::i8; })) ==
        "KV-cache group 0 (full attention): dtype is i8, f32, f16 or bf16 is needed");
  CHECK(refusal<InvalidArgument>(model, attention([](auto& spec) { spec.page_size_padded = 1023; })) ==
        "KV-cache group 0 (full attention): page_size_padded is 1023 bytes, not a multiple of 4 (f32)");
  CHECK(refusal<InvalidArgument>(model, gdn([](auto& spec) { spec.shapes[0] = {3, 64}; })) ==
        "KV-cache group 1 (mamba): the conv state is [3, 64], the model needs [conv_dim, kernel - 1 + speculative "
        "tokens] = "
        "[64, 3]");
  CHECK(refusal<InvalidArgument>(model, gdn([](auto& spec) { spec.shapes[1] = {4, 8, 9}; })) ==
        "KV-cache group 1 (mamba): the temporal state is [4, 8, 9], the model needs [value heads, value head dim, key "
        "head "
        "dim] = [4, 8, 8]");
  CHECK(refusal<InvalidArgument>(model, gdn([](auto& spec) { spec.dtypes[1] = DType::f64; })) ==
        "KV-cache group 1 (mamba): a state dtype is f64, f32, f16 or bf16 is needed");
  CHECK(refusal<Unsupported>(model, gdn([](auto& spec) { spec.mamba_type = MambaType::mamba2; })) ==
        "KV-cache group 1 (mamba): mamba_type is not gdn, and the model's recurrent layers are");
  CHECK(refusal<InvalidArgument>(model, with_groups(good, {good.groups[0]})) ==
        "the model has 3 recurrent layers, and the KV-cache config has no mamba group");
  CHECK(refusal<InvalidArgument>(model, with_groups(good, {})) ==
        "the KV-cache config has 0 groups and none is a full-attention group of the target model");

  KVCacheConfig no_blocks = good;
  no_blocks.num_blocks = 0;
  CHECK(refusal<InvalidArgument>(model, no_blocks) == "num_blocks is 0, at least 1 is needed");
  KVCacheConfig no_slots = good;
  no_slots.num_running_slots = 0;
  CHECK(refusal<InvalidArgument>(model, no_slots) == "num_running_slots is 0, one request alone needs 1");
  KVCacheConfig other_layers = good;
  other_layers.groups[1].layer_names.pop_back();
  CHECK(refusal<InvalidArgument>(model, other_layers) ==
        "KV-cache group 1 (mamba) names 2 layers, the model has 3 of that kind");
}

TEST_CASE("options out of range are refused by name at construction") {
  const TinyModel model = tiny_qwen3_5();
  const auto refused = [&](auto change) {
    RunnerOptions options = small_options();
    change(options);
    return refusal<InvalidArgument>(model, cache_config(model.config), options);
  };
  CHECK(refused([](auto& options) { options.max_num_reqs = 0; }) == "max_num_reqs is 0, at least 1 is needed");
  CHECK(refused([](auto& options) { options.max_model_len = 0; }) == "max_model_len is 0, at least 1 is needed");
  CHECK(refused([](auto& options) { options.max_num_batched_tokens = -1; }) ==
        "max_num_batched_tokens is -1, at least 1 is needed");
  CHECK(refused([](auto& options) { options.num_speculative_tokens = -1; }) ==
        "num_speculative_tokens is -1, it cannot be negative");
}

TEST_CASE("a runner is built from a checkpoint folder, or from a config and a map of tensors in memory") {
  const std::filesystem::path folder = std::filesystem::path(DELTAIC_SOURCE_DIR) / "tests_py/data/parity/qwen3_5/fp32";
  const ModelConfig config = load_model_config(folder);
  Engine engine(ModelRunner(folder, cache_config(config), small_options()));
  CHECK(engine.runner.model_config().vocab_size == 256);
  CHECK(engine.runner.weight_bytes() > 0);
  engine.add("a", prompt_of(7, 1));
  CHECK(engine.generate("a", 4) == dense_greedy(engine.runner, prompt_of(7, 1), 4));
}

TEST_CASE("a runner can be moved") {
  const TinyModel model = tiny_qwen3_5();
  ModelRunner first = make_runner(model);
  ModelRunner second = std::move(first);
  Engine engine(std::move(second));
  engine.add("a", prompt_of(7, 1));
  CHECK(engine.generate("a", 2) == dense_greedy(engine.runner, prompt_of(7, 1), 2));
}

TEST_CASE("a device that there is not is refused") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.device = {DeviceType::cuda, num_cuda_devices()};
  if (num_cuda_devices() == 0)
    CHECK_THROWS_AS(make_runner(model, {}, options), Unsupported);
  else
    CHECK_THROWS_WITH_AS(make_runner(model, {}, options), doctest::Contains("there is no CUDA device"),
                         InvalidArgument);
}

TEST_CASE("drafts that a script accepts are for CUDA") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.device = {};
  options.num_speculative_tokens = 2;
  options.scripted_draft_acceptance = 0.8F;
  CHECK_THROWS_AS(make_runner(model, {.num_speculative_tokens = 2}, options), Unsupported);
}

TEST_CASE("the CPU computes in f32") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.device = {};
  options.dtype = DType::bf16;
  CHECK_THROWS_WITH_AS(make_runner(model, {}, options), doctest::Contains("dtype is bf16, the CPU computes in f32"),
                       InvalidArgument);
}

TEST_CASE("dummy weights need no tensors, and are the same every time") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.dummy_weights = true;
  const auto generate = [&] {
    Engine engine(ModelRunner(model.config, TensorMap{}, cache_config(model.config), options));
    engine.add("a", prompt_of(7, 1));
    return engine.generate("a", 4);
  };
  CHECK(generate() == generate());
}

TEST_CASE("dummy weights on the CPU are as large as the checkpoint that the config describes") {
  TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.device = {};
  options.dummy_weights = true;
  const auto weight_bytes = [&](DType dtype) {
    model.config.dtype = dtype;
    return ModelRunner(model.config, TensorMap{}, cache_config(model.config), options).weight_bytes();
  };
  const std::int64_t half = weight_bytes(DType::bf16), full = weight_bytes(DType::f32);
  CHECK(half < full);
  CHECK(full < 2 * half);  // vectors are f32
}

TEST_CASE("more ranks than one are refused with the numbers") {
  const TinyModel model = tiny_qwen3_5();
  RunnerOptions options = small_options();
  options.parallel = {.tensor_parallel_size = 2, .rank = 1};
  CHECK(refusal<Unsupported>(model, cache_config(model.config), options) ==
        "tensor_parallel_size is 2 and rank 1; this version runs a model on one device");
}

#include "cpp/src/models/sharding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>

#include <deltaic/cache.h>
#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/loader/checkpoint.h"
#include "cpp/src/models/decoder_weights.h"
#include "cpp/src/models/dense_forward.h"
#include "cpp/src/stages/stage_tensors.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::make_tiny_model;
using test::TinyModel;

namespace {

constexpr Architecture kArchitectures[] = {Architecture::qwen3, Architecture::qwen3_moe, Architecture::qwen3_next,
                                           Architecture::qwen3_5, Architecture::qwen3_5_moe};

const std::filesystem::path kData = std::filesystem::path(DELTAIC_SOURCE_DIR) / "tests_py/data";

// Folders below tests_py/data/parity with a checkpoint.
std::vector<std::filesystem::path> parity_checkpoints() {
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kData / "parity"))
    if (entry.path().filename() == "config.json") folders.push_back(entry.path().parent_path());
  return folders;
}

// What the shards of two ranks leave out or have twice; nothing for a tensor that each rank has whole. A single K/V
// head is on both.
int num_rows_off(const TensorView& view, const ModelConfig& config, const std::string& name) {
  std::vector<int> owners;
  for (int rank = 0; rank < 2; ++rank) {
    const TensorShard shard = shard_of(config, name, {.tensor_parallel_size = 2, .rank = rank});
    if (shard.is_replicated()) return 0;
    owners.resize(static_cast<std::size_t>(view.shape[static_cast<std::size_t>(shard.dim)]), 0);
    for (const IndexRange range : shard.ranges)
      for (std::int64_t i = range.begin; i < range.end; ++i) ++owners.at(static_cast<std::size_t>(i));
  }
  const bool is_shared = config.num_kv_heads == 1 &&
                         (name.find(".k_proj.") != std::string::npos || name.find(".v_proj.") != std::string::npos);
  return static_cast<int>(std::count_if(owners.begin(), owners.end(), [&](int n) { return n != (is_shared ? 2 : 1); }));
}

std::string without_prefix(std::string name) {
  return name.starts_with("model.") ? name.substr(std::strlen("model.")) : name;
}

std::vector<std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

// The values of a shard, and its shape.
std::vector<float> cut(const TensorView& whole, const TensorShard& shard, std::vector<std::int64_t>& shape) {
  shape = shape_of(whole);
  const auto* values = whole.as<float>();
  if (shard.is_replicated()) return {values, values + whole.numel()};
  const auto dim = static_cast<std::size_t>(shard.dim);
  const std::int64_t size = shape[dim];
  const auto product = [&](std::size_t begin, std::size_t end) {
    return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(begin),
                           shape.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{1}, std::multiplies<>());
  };
  const std::int64_t outer = product(0, dim), inner = product(dim + 1, shape.size());
  std::vector<float> result;
  for (std::int64_t o = 0; o < outer; ++o)
    for (const IndexRange range : shard.ranges) {
      const float* first = values + (o * size + range.begin) * inner;
      result.insert(result.end(), first, first + range.size() * inner);
    }
  shape[dim] = 0;
  for (const IndexRange range : shard.ranges) shape[dim] += range.size();
  return result;
}

// A model of one layer of `model`, in which the tensors of this projection are zero.
TinyModel one_layer(const TinyModel& model, int layer, const std::string& projection) {
  TinyModel result;
  result.config = model.config;
  result.config.num_layers = 1;
  result.config.layer_kinds = {model.config.layer_kinds[static_cast<std::size_t>(layer)]};
  result.config.is_moe_layer = {model.config.is_moe_layer[static_cast<std::size_t>(layer)]};
  const std::string from = "model.layers." + std::to_string(layer) + ".", to = "model.layers.0.";
  for (const auto& [name, view] : model.tensors) {
    if (name.starts_with("model.layers.") && !name.starts_with(from)) continue;
    std::vector<float> values = model.values(name);
    if (name.find("." + projection) != std::string::npos) std::fill(values.begin(), values.end(), 0.0F);
    result.set(name.starts_with(from) ? to + name.substr(from.size()) : name, shape_of(view), std::move(values));
  }
  return result;
}

TinyModel rank_of(const TinyModel& model, const ParallelConfig& parallel) {
  TinyModel local;
  local.config = local_config(model.config, parallel);
  for (const auto& [name, view] : model.tensors) {
    const bool is_vocabulary = name.ends_with("embed_tokens.weight") || name == "lm_head.weight";
    std::vector<std::int64_t> shape;
    std::vector<float> values =
        cut(view, is_vocabulary ? TensorShard{} : shard_of(model.config, without_prefix(name), parallel), shape);
    local.set(name, shape, std::move(values));
  }
  return local;
}

// What the layer adds to the residual stream, [num_tokens * hidden_size].
std::vector<float> contribution(const TinyModel& model) {
  ThreadPool threads(1);
  const std::vector<std::int32_t> tokens{3, 17, 40, 5, 9};
  const auto weights = load_decoder_weights(model.config, Checkpoint::from_memory(model.tensors));
  const DenseForwardOutput output =
      dense_forward(model.config, weights, {.device = {}, .stream = {}, .threads = &threads}, tokens, true, {});
  const std::size_t size = tokens.size() * static_cast<std::size_t>(model.config.hidden_size);
  std::vector<float> difference(size);
  for (std::size_t i = 0; i < size; ++i) difference[i] = output.hidden[size + i] - output.hidden[i];
  return difference;
}

void check_ranks_add_up(const TinyModel& model, int size) {
  const std::vector<float> whole = contribution(model);
  std::vector<double> sum(whole.size(), 0.0);
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<float> part = contribution(rank_of(model, {.tensor_parallel_size = size, .rank = rank}));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  double largest = 0.0, error = 0.0;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    largest = std::max(largest, std::abs(double{whole[i]}));
    error = std::max(error, std::abs(sum[i] - whole[i]));
  }
  CHECK(largest > 1e-3);  // the layer does something
  CHECK(error <= 1e-5 * largest);
}

}  // namespace

TEST_CASE("what the ranks' shards add to the residual stream sums up to what the whole layer adds") {
  for (const Architecture architecture : kArchitectures)
    for (const bool fused_experts : {false, true}) {
      const TinyModel model = make_tiny_model(architecture, {.fused_experts = fused_experts});
      for (const int layer : {0, 3}) {
        CAPTURE(name(architecture));
        CAPTURE(fused_experts);
        CAPTURE(layer);
        const bool is_recurrent =
            model.config.layer_kinds[static_cast<std::size_t>(layer)] == LayerKind::linear_attention;
        for (const int size : is_recurrent ? std::vector{2} : std::vector{2, 4}) {
          if (model.config.is_hybrid_family() && size > model.config.linear_num_key_heads) continue;
          CAPTURE(size);
          check_ranks_add_up(one_layer(model, layer, "down_proj"), size);
        }
        for (const std::string mixer_output : {"o_proj", "out_proj"})
          if (is_recurrent == (mixer_output == "out_proj"))
            check_ranks_add_up(one_layer(model, layer, mixer_output), 2);
      }
    }
}

TEST_CASE("the shards of a tensor cover it once, or each rank has all of it") {
  for (const Architecture architecture : kArchitectures) {
    const TinyModel model = make_tiny_model(architecture);
    for (const auto& [stored_name, view] : model.tensors) {
      CAPTURE(stored_name);
      CHECK(num_rows_off(view, model.config, without_prefix(stored_name)) == 0);
    }
  }
}

TEST_CASE("each tensor of each checkpoint, its draft module too, has one rule that fits its shape") {
  int num_tensors = 0, num_of_drafts = 0;
  for (const std::filesystem::path& folder : parity_checkpoints()) {
    const ModelConfig config = load_model_config(folder);
    const Checkpoint checkpoint = Checkpoint::open(folder);
    const StoredTensors tensors = open_stage_tensors(folder);
    for (const std::string& name : checkpoint.names("")) {
      CAPTURE(folder);
      CAPTURE(name);
      CHECK(sharding_rules_of(name).size() == 1);
      if (config.linear_num_key_heads % 2 == 0)  // one key head does not divide
        CHECK(num_rows_off(tensors.at(checkpoint.stored_name(name)).view, config, name) == 0);
      ++num_tensors;
      num_of_drafts += name.starts_with("mtp.layers.") ? 1 : 0;
    }
  }
  CHECK(num_tensors > 500);
  CHECK(num_of_drafts > 20);
}

TEST_CASE("each tensor of a model that speaks has one rule: talker, code predictor, codec") {
  const auto names_of = [](const std::filesystem::path& path, const std::string& part) {
    const StoredTensors tensors = open_stage_tensors(kData / "speech" / path);
    return Checkpoint::from_stored(part.empty() ? tensors : part_of(tensors, part), path.string()).names("");
  };
  for (const auto& [path, part] : {std::pair{"tts", "talker."}, {"omni", "talker."}, {"tts/speech_tokenizer", ""}}) {
    const std::vector<std::string> names = names_of(path, part);
    CHECK(names.size() > 30);
    for (const std::string& name : names) {
      CAPTURE(path);
      CAPTURE(name);
      CHECK(sharding_rules_of(name).size() == 1);
    }
  }
  for (const std::string& name : names_of("omni", "code2wav.")) {
    CAPTURE(name);
    CHECK(sharding_rules_of("code2wav." + name).size() == 1);
  }
}

TEST_CASE("a pattern's star is one part of a name") {
  CHECK(sharding_rules_of("layers.3.self_attn.q_proj.bias").size() == 1);
  for (const std::string_view name : {"", "layers..norm.weight", "layers.3.norm.weight", "layers.3.self_attn.q_proj",
                                      "layers.1.2.self_attn.q_proj.bias", "mtp.embed_tokens.weight", "norm.weight.x"})
    CHECK_MESSAGE(sharding_rules_of(name).empty(), name);
}

TEST_CASE("caches of a rank are planned from its share of the model") {
  const ModelConfig config = make_tiny_model(Architecture::qwen3_5).config;
  const ModelConfig local = local_config(config, {.tensor_parallel_size = 2, .rank = 1});
  const auto page_bytes = [](const ModelConfig& model) {
    std::vector<std::int64_t> bytes;
    for (const KVCacheGroupSpec& group : make_kv_cache_groups(model, {}).groups)
      bytes.push_back(std::visit([](const auto& spec) { return spec.page_size_bytes(); }, group.spec));
    return bytes;
  };
  const std::vector<std::int64_t> whole = page_bytes(config), half = page_bytes(local);
  REQUIRE(whole.size() == 2);
  REQUIRE(half.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) CHECK(2 * half[i] == whole[i]);
}

TEST_CASE("one rank has the whole model") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5);
  CHECK(shard_of(model.config, "layers.0.mlp.up_proj.weight", {}).is_replicated());
  CHECK(local_config(model.config, {}).num_heads == model.config.num_heads);
}

TEST_CASE("fewer K/V heads than ranks are repeated, each whole") {
  ModelConfig config = make_tiny_model(Architecture::qwen3).config;
  config.num_heads = 8, config.num_kv_heads = 2, config.head_dim = 16;
  for (int rank = 0; rank < 4; ++rank) {
    const TensorShard shard =
        shard_of(config, "layers.0.self_attn.k_proj.weight", {.tensor_parallel_size = 4, .rank = rank});
    REQUIRE(shard.ranges.size() == 1);
    CHECK(shard.ranges[0] == IndexRange{rank / 2 * 16, rank / 2 * 16 + 16});
  }
  CHECK(local_config(config, {.tensor_parallel_size = 4, .rank = 1}).num_kv_heads == 1);
}

TEST_CASE("a vocabulary that does not divide is cut within a row") {
  ModelConfig config = make_tiny_model(Architecture::qwen3).config;
  config.vocab_size = 65;
  std::int64_t next = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const TensorShard shard = shard_of(config, "lm_head.weight", {.tensor_parallel_size = 2, .rank = rank});
    CHECK(shard.ranges[0].begin == next);
    next = shard.ranges[0].end;
  }
  CHECK(next == 65);
}

TEST_CASE("sizes that do not divide, ranks that do not exist and unknown tensors are refused by name") {
  const ModelConfig config = make_tiny_model(Architecture::qwen3_5).config;
  const auto message = [&](std::string_view tensor, const ParallelConfig& parallel) -> std::string {
    try {
      shard_of(config, tensor, parallel);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message("norm.weight", {.tensor_parallel_size = 3, .rank = 0}).find("num_attention_heads") !=
        std::string::npos);
  CHECK(message("norm.weight", {.tensor_parallel_size = 2, .rank = 2}).find("rank 2 of 2") != std::string::npos);
  CHECK(message("norm.weight", {.tensor_parallel_size = 0, .rank = 0}).find("above 0") != std::string::npos);
  for (const int size : {1, 2})
    CHECK(message("layers.0.self_attn.x_proj", {.tensor_parallel_size = size, .rank = 0}).find("x_proj") !=
          std::string::npos);
}

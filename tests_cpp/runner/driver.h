#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <deltaic/error.h>
#include <deltaic/runner.h>

#include "cpp/src/runner/input_batch.h"
#include "tests_cpp/support/test_device.h"
#include "tests_cpp/support/tiny_model.h"

namespace deltaic::test {

using Tokens = std::vector<std::int32_t>;

// Three GDN layers and a full-attention layer: dense, mixture of experts; and full attention alone.
inline TinyModel tiny_qwen3_5() { return make_tiny_model(Architecture::qwen3_5); }
inline TinyModel tiny_qwen3_next() { return make_tiny_model(Architecture::qwen3_next); }
inline TinyModel tiny_qwen3() { return make_tiny_model(Architecture::qwen3); }

struct CacheChoice {
  int block_size = 4;
  int num_blocks = 64;
  DType kv_dtype = DType::f32;
  DType conv_dtype = DType::f32;
  DType temporal_dtype = DType::f32;
  int num_speculative_tokens = 0;
  std::optional<std::int64_t> page_size_padded = std::nullopt;
  int num_snapshot_slots = 0;
};

// One full-attention group, then one GDN group when the model has such layers.
inline KVCacheConfig cache_config(const ModelConfig& model, const CacheChoice& choice = {}) {
  KVCacheConfig config;
  config.num_blocks = choice.num_blocks;
  config.num_snapshot_slots = choice.num_snapshot_slots;
  FullAttentionSpec attention;
  attention.block_size = choice.block_size;
  attention.num_kv_heads = model.num_kv_heads;
  attention.head_size = model.head_dim;
  attention.dtype = choice.kv_dtype;
  attention.page_size_padded = choice.page_size_padded;
  KVCacheGroupSpec attention_group{.layer_names = {}, .spec = attention};
  KVCacheGroupSpec gdn_group;
  for (int i = 0; i < model.num_layers; ++i) {
    const bool is_gdn =
        !model.layer_kinds.empty() && model.layer_kinds[static_cast<std::size_t>(i)] == LayerKind::linear_attention;
    (is_gdn ? gdn_group : attention_group).layer_names.push_back("model.layers." + std::to_string(i));
  }
  config.groups.push_back(attention_group);
  if (gdn_group.layer_names.empty()) return config;
  MambaSpec gdn;
  gdn.shapes = {{model.conv_dim(), model.linear_conv_kernel_dim - 1 + choice.num_speculative_tokens},
                {model.linear_num_value_heads, model.linear_value_head_dim, model.linear_key_head_dim}};
  gdn.dtypes = {choice.conv_dtype, choice.temporal_dtype};
  gdn_group.spec = gdn;
  config.groups.push_back(gdn_group);
  return config;
}

// A draft model's group, marked or not.
inline KVCacheGroupSpec draft_group(const ModelConfig& model, bool is_marked, int block_size = 4) {
  FullAttentionSpec spec;
  spec.block_size = block_size;
  spec.num_kv_heads = 2 * model.num_kv_heads;
  spec.head_size = model.head_dim;
  return {.layer_names = {"mtp.layers.0"}, .spec = spec, .is_eagle_group = is_marked};
}

// On the device of the tests, with caches full of NaN.
inline RunnerOptions small_options() {
  RunnerOptions options;
  options.device = test_device();
  options.max_num_reqs = 8;
  options.max_model_len = 64;
  options.max_num_batched_tokens = 64;
  options.num_threads = 1;
  options.poison_caches = true;
  return options;
}

inline ModelRunner make_runner(const TinyModel& model, const CacheChoice& choice = {},
                               const RunnerOptions& options = small_options()) {
  return ModelRunner(model.config, model.tensors, cache_config(model.config, choice), options);
}

inline SamplingParams greedy() {
  SamplingParams params;
  params.temperature = 0.0F;
  return params;
}
inline SamplingParams seeded(std::int64_t seed, float temperature = 1.0F) {
  SamplingParams params;
  params.temperature = temperature;
  params.seed = seed;
  return params;
}

// A SchedulerOutput, made by hand. Block ids are those of group 0; other groups get none.
class Step {
 public:
  explicit Step(int num_groups) : num_groups_(num_groups) {}
  explicit Step(const ModelRunner& runner) : Step(static_cast<int>(runner.kv_cache_config().groups.size())) {}

  NewRequestData& admit(const std::string& req_id, Tokens prompt, std::vector<int> blocks, int num_scheduled,
                        SamplingParams params = greedy(), int num_computed = 0) {
    NewRequestData request;
    request.req_id = req_id;
    request.prompt_token_ids = std::move(prompt);
    request.sampling_params = std::move(params);
    request.block_ids = groups(std::move(blocks));
    request.num_computed_tokens = num_computed;
    output.scheduled_new_reqs.push_back(std::move(request));
    schedule(req_id, num_scheduled);
    return output.scheduled_new_reqs.back();
  }
  Step& run(const std::string& req_id, int num_computed, int num_scheduled, std::vector<int> new_blocks = {},
            std::optional<int> num_output = std::nullopt) {
    CachedRequestData& cached = output.scheduled_cached_reqs;
    cached.req_ids.push_back(req_id);
    cached.num_computed_tokens.push_back(num_computed);
    if (num_output) cached.num_output_tokens.push_back(*num_output);
    if (new_blocks.empty())
      cached.new_block_ids.emplace_back(std::nullopt);
    else
      cached.new_block_ids.emplace_back(groups(std::move(new_blocks)));
    schedule(req_id, num_scheduled);
    return *this;
  }
  Step& schedule(const std::string& req_id, int num_scheduled) {
    if (num_scheduled == 0) return *this;
    output.num_scheduled_tokens[req_id] = num_scheduled;
    output.total_num_scheduled_tokens += num_scheduled;
    return *this;
  }
  Step& finish(const std::string& req_id) {
    output.finished_req_ids.push_back(req_id);
    return *this;
  }
  Step& preempt(const std::string& req_id) {
    output.preempted_req_ids.push_back(req_id);
    return *this;
  }
  Step& copy(const std::string& req_id, StateCopyKind kind, int slot, int num_tokens) {
    output.state_copies.push_back({req_id, kind, slot, num_tokens});
    return *this;
  }

  SchedulerOutput output;

 private:
  std::vector<std::vector<int>> groups(std::vector<int> blocks) const {
    std::vector<std::vector<int>> lists(static_cast<std::size_t>(num_groups_));
    lists[0] = std::move(blocks);
    return lists;
  }
  int num_groups_;
};

// Executes and samples.
inline ModelRunnerOutput run_step(ModelRunner& runner, const Step& step) {
  if (auto output = runner.execute_model(step.output)) return *std::move(output);
  return runner.sample_tokens();
}

inline std::int32_t argmax_of_last(const DenseForwardOutput& dense, int vocab_size) {
  const auto last = dense.logits.end() - vocab_size;
  return static_cast<std::int32_t>(std::max_element(last, dense.logits.end()) - last);
}

// The token that a dense forward over these tokens alone prefers.
inline std::int32_t dense_argmax(ModelRunner& runner, const Tokens& tokens) {
  return argmax_of_last(runner.dense_forward(tokens), runner.model_config().vocab_size);
}

// Greedy continuation by dense forwards.
inline Tokens dense_greedy(ModelRunner& runner, Tokens tokens, int count) {
  Tokens generated;
  for (int i = 0; i < count; ++i) {
    generated.push_back(dense_argmax(runner, tokens));
    tokens.push_back(generated.back());
  }
  return generated;
}

// A prompt that differs from others by its seed.
inline Tokens prompt_of(int length, int seed) {
  Tokens tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((seed * 17 + i * 7 + i * i * 3) % 61);
  return tokens;
}

// A scheduler of a few lines: every live request runs all its known tokens in every step, `chunk` at most.
class Engine {
 public:
  enum class Output { sync, async };

  explicit Engine(ModelRunner model_runner, Output output = Output::sync, int chunk = 1000)
      : runner(std::move(model_runner)), output_(output), chunk_(chunk) {
    const auto num_blocks = static_cast<int>(runner.num_blocks());
    for (int block = num_blocks - 1; block >= 0; --block) free_blocks_.push_back(block);
  }

  void add(const std::string& req_id, Tokens prompt, SamplingParams params = greedy()) {
    Request& request = requests_[req_id];
    request.num_prompt = static_cast<int>(prompt.size());
    request.tokens = std::move(prompt);
    request.params = std::move(params);
    order_.push_back(req_id);
  }
  void finish(const std::string& req_id) {
    release(req_id);
    finished_.push_back(req_id);
    std::erase(order_, req_id);
    requests_.erase(req_id);
  }
  // It comes back in the next step.
  void preempt(const std::string& req_id) {
    release(req_id);
    preempted_.push_back(req_id);
    requests_[req_id].is_known = false;
    requests_[req_id].num_computed = 0;
  }

  ModelRunnerOutput step() {
    Step step(runner);
    for (const std::string& req_id : order_) {
      Request& request = requests_[req_id];
      const int count = std::min(chunk_, static_cast<int>(request.tokens.size()) - request.num_computed);
      std::vector<int> blocks;
      const int block_size = std::get<FullAttentionSpec>(runner.kv_cache_config().groups[0].spec).block_size;
      while (static_cast<int>(request.blocks.size()) * block_size < request.num_computed + count) {
        blocks.push_back(free_blocks_.back());
        request.blocks.push_back(free_blocks_.back());
        free_blocks_.pop_back();
      }
      if (request.is_known) {
        step.run(req_id, request.num_computed, count, blocks,
                 static_cast<int>(request.tokens.size()) - request.num_prompt);
      } else {
        Tokens prompt(request.tokens.begin(), request.tokens.begin() + request.num_prompt);
        step.admit(req_id, prompt, blocks, count, request.params).prefill_token_ids = request.tokens;
        request.is_known = true;
      }
      request.num_computed += count;
    }
    step.output.finished_req_ids = std::exchange(finished_, {});
    step.output.preempted_req_ids = std::exchange(preempted_, {});
    ModelRunnerOutput output;
    if (auto empty = runner.execute_model(step.output))
      output = *std::move(empty);
    else
      output = output_ == Output::sync ? runner.sample_tokens() : runner.sample_tokens_async().get_output();
    for (std::size_t i = 0; i < output.req_ids.size(); ++i)
      for (const std::int32_t token : output.sampled_token_ids[i]) requests_[output.req_ids[i]].tokens.push_back(token);
    return output;
  }
  // Steps until the request has so many output tokens; returns them.
  Tokens generate(const std::string& req_id, int count) {
    while (num_output(req_id) < count) step();
    const Request& request = requests_[req_id];
    return {request.tokens.begin() + request.num_prompt, request.tokens.begin() + request.num_prompt + count};
  }
  int num_output(const std::string& req_id) {
    return static_cast<int>(requests_[req_id].tokens.size()) - requests_[req_id].num_prompt;
  }

  ModelRunner runner;

 private:
  struct Request {
    Tokens tokens;
    int num_prompt = 0;
    int num_computed = 0;
    bool is_known = false;
    std::vector<int> blocks;
    SamplingParams params;
  };
  // Freed blocks are the next to be used.
  void release(const std::string& req_id) {
    auto& blocks = requests_[req_id].blocks;
    free_blocks_.insert(free_blocks_.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }

  Output output_;
  int chunk_;
  std::map<std::string, Request> requests_;
  std::vector<std::string> order_, finished_, preempted_;
  std::vector<int> free_blocks_;
};

}  // namespace deltaic::test

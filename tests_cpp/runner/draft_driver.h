#pragma once

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests_cpp/runner/driver.h"

namespace deltaic::test {

inline constexpr int kDrafts = 3;

// On CUDA without graphs, which would take longer to record than most tests to run.
inline RunnerOptions draft_options(int max_model_len = 64) {
  RunnerOptions options = small_options();
  options.max_model_len = max_model_len;
  options.max_num_batched_tokens = 512;
  options.num_speculative_tokens = kDrafts;
  options.enforce_eager = true;
  return options;
}

// Caches for kDrafts drafts; with a group for the draft module where `makes_drafts`.
inline KVCacheConfig draft_caches(const TinyModel& model, CacheChoice choice = {}, bool makes_drafts = false) {
  choice.num_speculative_tokens = kDrafts;
  KVCacheConfig config = cache_config(model.config, choice);
  if (makes_drafts) {
    KVCacheGroupSpec group{.layer_names = {"mtp.layers.0"}, .spec = config.groups[0].spec, .is_eagle_group = true};
    config.groups.push_back(group);
  }
  return config;
}

// A scheduler of a few lines for scripted drafts: a test says for each step how many drafts a request gets and how many
// of them are right. It knows the right tokens before: those of plain greedy decoding.
class DraftEngine {
 public:
  struct Request {
    Tokens tokens;  // prompt, then what the runner gave
    Tokens greedy;  // what must come behind the prompt
    int num_prompt = 0, num_computed = 0, prefill_length = 0;
    bool is_known = false;
    std::vector<int> blocks, spare_blocks;  // spare: to be told to the runner with the next step
    SamplingParams params = test::greedy();
    int num_output() const { return static_cast<int>(tokens.size()) - num_prompt; }
  };
  struct Script {
    int num_drafts = 0, num_right = 0;
    int num_prefill = 0;  // tokens of a prefill step; 0: all
  };

  explicit DraftEngine(ModelRunner model_runner) : runner(std::move(model_runner)) {
    for (int block = static_cast<int>(runner.num_blocks()) - 1; block > 0; --block) free_blocks_.push_back(block);
  }

  void add(const std::string& req_id, Tokens prompt, int max_output = 60) {
    Request& request = requests[req_id];
    request.num_prompt = request.prefill_length = static_cast<int>(prompt.size());
    request.greedy = dense_greedy(runner, prompt, max_output);
    request.tokens = std::move(prompt);
  }
  void finish(const std::string& req_id) {
    release(req_id);
    finished_.push_back(req_id);
    requests.erase(req_id);
  }
  void preempt(const std::string& req_id) {
    release(req_id);
    preempted_.push_back(req_id);
    Request& request = requests[req_id];
    request.is_known = false;
    request.num_computed = 0;
    request.prefill_length = static_cast<int>(request.tokens.size());
  }

  // Runs a step of the requests named; checks that each gives the right tokens: as many drafts as are right, and one.
  ModelRunnerOutput step(const std::map<std::string, Script>& scripts) {
    Step step(runner);
    std::map<std::string, std::pair<int, int>> counts;  // drafts, right
    for (const auto& [req_id, script] : scripts) {
      Request& request = requests[req_id];
      const int behind = static_cast<int>(request.tokens.size()) - request.num_computed;
      const bool decodes = behind == 1 && request.num_computed >= request.prefill_length;
      const int num_drafts = decodes ? script.num_drafts : 0;
      const int count = decodes                  ? 1 + num_drafts
                        : script.num_prefill > 0 ? std::min(script.num_prefill, behind)
                                                 : behind;
      std::vector<int> blocks = std::exchange(request.spare_blocks, {});
      for (const int block : grow(request, request.num_computed + count)) blocks.push_back(block);
      if (request.is_known) {
        step.run(req_id, request.num_computed, count, blocks, request.num_output());
      } else {
        const Tokens prompt(request.tokens.begin(), request.tokens.begin() + request.num_prompt);
        step.admit(req_id, prompt, blocks, count, request.params, request.num_computed).prefill_token_ids =
            request.tokens;
        request.is_known = true;
      }
      if (num_drafts > 0)
        step.output.scheduled_spec_decode_tokens[req_id] = drafts(request, num_drafts, script.num_right);
      counts[req_id] = {num_drafts, std::min(script.num_right, num_drafts)};
      request.num_computed += count - num_drafts;
    }
    step.output.finished_req_ids = std::exchange(finished_, {});
    step.output.preempted_req_ids = std::exchange(preempted_, {});
    step.output.state_copies = std::exchange(copies, {});
    ModelRunnerOutput output = run_step(runner, step);
    for (const auto& [req_id, count] : counts) {
      Request& request = requests[req_id];
      const Tokens& sampled = output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at(req_id))];
      CAPTURE(req_id);
      if (request.num_computed < static_cast<int>(request.tokens.size())) {
        CHECK(sampled.empty());
        continue;
      }
      const auto first = request.greedy.begin() + request.num_output();
      const Tokens wanted(first, first + count.second + 1);
      std::string text = "got";
      for (const std::int32_t token : sampled) text.append(" ").append(std::to_string(token));
      text += ", wanted";
      for (const std::int32_t token : wanted) text.append(" ").append(std::to_string(token));
      REQUIRE_MESSAGE(sampled == wanted, text << ", " << count.first << " drafts, at token " << request.num_computed);
      request.tokens.insert(request.tokens.end(), sampled.begin(), sampled.end());
      request.num_computed = static_cast<int>(request.tokens.size()) - 1;
    }
    return output;
  }
  ModelRunnerOutput step_all(const Script& script) {
    std::map<std::string, Script> scripts;
    for (const auto& [req_id, request] : requests) scripts[req_id] = script;
    return step(scripts);
  }

  // num_right right drafts, then wrong ones.
  static Tokens drafts(const Request& request, int num_drafts, int num_right) {
    Tokens result;
    for (int j = 0; j < num_drafts; ++j) {
      const std::int32_t right = request.greedy[static_cast<std::size_t>(request.num_output() + j)];
      result.push_back(j < num_right ? right : (right + 1 + j) % 64);
    }
    return result;
  }

  std::vector<int> grow(Request& request, int num_tokens) {
    const int block_size = std::get<FullAttentionSpec>(runner.kv_cache_config().groups[0].spec).block_size;
    std::vector<int> added;
    while (static_cast<int>(request.blocks.size()) * block_size < num_tokens) {
      added.push_back(free_blocks_.back());
      request.blocks.push_back(free_blocks_.back());
      free_blocks_.pop_back();
    }
    return added;
  }

  ModelRunner runner;
  std::map<std::string, Request> requests;
  std::vector<StateCopy> copies;  // of the next step

 private:
  void release(const std::string& req_id) {
    auto& blocks = requests[req_id].blocks;
    free_blocks_.insert(free_blocks_.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }

  std::vector<std::string> finished_, preempted_;
  std::vector<int> free_blocks_;
};

}  // namespace deltaic::test

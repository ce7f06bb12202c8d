#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests_cpp/runner/draft_driver.h"

namespace deltaic::test {

// A scheduler of a few lines that is ahead of the output by `depth` steps: it counts all drafts in flight as accepted,
// and their ids are placeholders.
class AsyncDraftEngine {
 public:
  struct Request {
    Tokens tokens;  // that were read
    int num_prompt = 0, num_computed = 0, num_placeholders = 0, num_drafts_coming = 0, life = 0;
    bool is_known = false;
    std::vector<int> blocks;
    SamplingParams params;
    Tokens output() const { return {tokens.begin() + num_prompt, tokens.end()}; }
  };

  AsyncDraftEngine(ModelRunner model_runner, int depth, int num_drafts)
      : runner(std::move(model_runner)), num_drafts_(num_drafts), depth_(depth) {
    for (int block = static_cast<int>(runner.num_blocks()) - 1; block > 0; --block) free_blocks_.push_back(block);
  }

  void add(const std::string& req_id, Tokens prompt, SamplingParams params = greedy()) {
    Request& request = requests[req_id];
    request.num_prompt = static_cast<int>(prompt.size());
    request.tokens = std::move(prompt);
    request.params = std::move(params);
  }
  void preempt(const std::string& req_id) {
    Request& request = requests[req_id];
    release(request);
    preempted_.push_back(req_id);
    request.num_computed = request.num_placeholders = request.num_drafts_coming = 0;
    request.is_known = false;
    ++request.life;
  }
  void finish(const std::string& req_id) {
    release(requests[req_id]);
    finished_.push_back(req_id);
    requests.erase(req_id);
  }

  // Enqueues a step of all requests, prefills of at most `chunk` tokens; reads what is further back than `depth`.
  void step(int chunk = 1000) {
    Step step(runner);
    InFlight flight;
    for (auto& [req_id, request] : requests) {
      const int num_tokens = static_cast<int>(request.tokens.size()) + request.num_placeholders;
      const int behind = num_tokens - request.num_computed;
      const bool decodes = behind == 1 && request.is_known;
      const int num_drafts = decodes ? std::min(request.num_drafts_coming, num_drafts_) : 0;
      const int count = decodes ? 1 + num_drafts : std::min(behind, chunk);
      std::vector<int> added;
      while (static_cast<int>(request.blocks.size()) * kBlockSize < request.num_computed + count + num_drafts_) {
        added.push_back(free_blocks_.back());
        request.blocks.push_back(added.back());
        free_blocks_.pop_back();
      }
      if (request.is_known) {
        step.run(req_id, request.num_computed, count, added, num_tokens - request.num_prompt);
      } else {
        const Tokens prompt(request.tokens.begin(), request.tokens.begin() + request.num_prompt);
        step.admit(req_id, prompt, added, count, request.params, 0).prefill_token_ids = request.tokens;
        request.is_known = true;
      }
      if (num_drafts > 0)
        step.output.scheduled_spec_decode_tokens[req_id] = Tokens(static_cast<std::size_t>(num_drafts), -1);
      request.num_computed += count;
      const bool samples = request.num_computed >= num_tokens;
      if (samples) request.num_placeholders += 1 + num_drafts, request.num_drafts_coming = num_drafts_;
      flight.rows[req_id] = {request.life, samples ? num_drafts : -1};
    }
    step.output.num_drafts = num_drafts_;
    step.output.finished_req_ids = std::exchange(finished_, {});
    step.output.preempted_req_ids = std::exchange(preempted_, {});
    if (!step.output.num_scheduled_tokens.empty()) {
      CHECK_FALSE(runner.execute_model(step.output).has_value());
      flight.output.emplace(runner.sample_tokens_async());
      in_flight_.push_back(std::move(flight));
    }
    while (static_cast<int>(in_flight_.size()) > depth_) read();
  }
  void read_all() {
    while (!in_flight_.empty()) read();
  }

  ModelRunner runner;
  std::map<std::string, Request> requests;
  int num_accepted = 0, num_made = 0;

 private:
  static constexpr int kBlockSize = 4;
  struct InFlight {
    std::map<std::string, std::pair<int, int>> rows;  // life, drafts; -1: it samples nothing
    std::optional<AsyncModelRunnerOutput> output;
  };

  void read() {
    const ModelRunnerOutput output = in_flight_.front().output->get_output();
    const auto rows = std::move(in_flight_.front().rows);
    in_flight_.pop_front();
    CHECK(output.failed_req_ids.empty());
    for (const auto& [req_id, row] : rows) {
      const auto found = requests.find(req_id);
      if (found == requests.end() || found->second.life != row.first) continue;
      Request& request = found->second;
      const Tokens& sampled = output.sampled_token_ids[static_cast<std::size_t>(output.req_id_to_index.at(req_id))];
      const int count = static_cast<int>(sampled.size());
      CHECK((count == 0) == (row.second < 0));
      if (count == 0) continue;
      CHECK(count <= 1 + row.second);
      request.tokens.insert(request.tokens.end(), sampled.begin(), sampled.end());
      request.num_placeholders -= 1 + row.second;
      request.num_computed -= 1 + row.second - count;
      num_accepted += count - 1, num_made += row.second;
    }
  }
  void release(Request& request) {
    free_blocks_.insert(free_blocks_.end(), request.blocks.begin(), request.blocks.end());
    request.blocks.clear();
  }

  int num_drafts_, depth_;
  std::deque<InFlight> in_flight_;
  std::vector<std::string> finished_, preempted_;
  std::vector<int> free_blocks_;
};

}  // namespace deltaic::test

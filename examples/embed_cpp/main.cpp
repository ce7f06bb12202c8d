// Greedy decoding of a fixed set of sequences with deltaic embedded in C++: no Python in the process.
//   embed_deltaic CHECKPOINT NUM_TOKENS PROMPT...      PROMPT: token ids with commas between them
// Prints the new tokens of a prompt on a line.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <deltaic/cache.h>
#include <deltaic/config.h>
#include <deltaic/runner.h>

namespace {

std::vector<std::int32_t> parse_token_ids(const std::string& list) {
  std::vector<std::int32_t> ids;
  std::istringstream stream(list);
  for (std::string id; std::getline(stream, id, ',');) ids.push_back(std::stoi(id));
  return ids;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: embed_deltaic CHECKPOINT NUM_TOKENS PROMPT...\n";
    return 2;
  }
  const int num_new_tokens = std::stoi(argv[2]), num_seqs = argc - 3;
  std::vector<deltaic::NewRequestData> requests(static_cast<std::size_t>(num_seqs));
  int longest = 0, num_prompt_tokens = 0;
  for (int i = 0; i < num_seqs; ++i) {
    deltaic::NewRequestData& request = requests[static_cast<std::size_t>(i)];
    request.req_id = std::to_string(i);
    request.prompt_token_ids = parse_token_ids(argv[3 + i]);
    request.sampling_params.temperature = 0.0F;
    longest = std::max(longest, static_cast<int>(request.prompt_token_ids.size()));
    num_prompt_tokens += static_cast<int>(request.prompt_token_ids.size());
  }

  // Memory for all of them at once, so there is nothing to schedule.
  const deltaic::ModelConfig model = deltaic::load_model_config(argv[1]);
  deltaic::MemoryPlanOptions memory;
  memory.memory_bytes = std::int64_t{256} << 20;
  memory.max_model_len = longest + num_new_tokens;
  memory.max_num_seqs = num_seqs;
  memory.enable_prefix_caching = false;
  const deltaic::KVCacheConfig caches = deltaic::plan_kv_cache(model, memory);
  deltaic::CacheManager cache(
      {.num_blocks = caches.num_blocks, .block_size = memory.block_size, .enable_prefix_caching = false});
  for (deltaic::NewRequestData& request : requests) {
    cache.add_request(request.req_id, request.prompt_token_ids);
    request.block_ids.assign(caches.groups.size(), {});
    request.block_ids[0] = cache.admit(request.req_id, {}, memory.max_model_len).value();
  }

  // The first step runs all prompts whole, each later one a token a sequence.
  deltaic::ModelRunner runner(
      argv[1], caches,
      {.max_num_reqs = num_seqs, .max_model_len = memory.max_model_len, .max_num_batched_tokens = num_prompt_tokens});
  std::vector<std::vector<std::int32_t>> new_tokens(static_cast<std::size_t>(num_seqs));
  deltaic::SchedulerOutput step;
  step.scheduled_new_reqs = requests;
  for (const deltaic::NewRequestData& request : requests)
    step.num_scheduled_tokens[request.req_id] = static_cast<int>(request.prompt_token_ids.size());
  step.total_num_scheduled_tokens = num_prompt_tokens;
  for (int n = 1; n <= num_new_tokens; ++n) {
    runner.execute_model(step);
    const deltaic::ModelRunnerOutput output = runner.sample_tokens();
    step = {};
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const std::string& id = requests[i].req_id;
      const auto row = static_cast<std::size_t>(output.req_id_to_index.at(id));
      new_tokens[i].push_back(output.sampled_token_ids[row].at(0));
      deltaic::CachedRequestData& cached = step.scheduled_cached_reqs;
      cached.req_ids.push_back(id);
      cached.num_computed_tokens.push_back(static_cast<int>(requests[i].prompt_token_ids.size()) + n - 1);
      cached.num_output_tokens.push_back(n);
      cached.new_block_ids.emplace_back(std::nullopt);
      step.num_scheduled_tokens[id] = 1;
    }
    step.total_num_scheduled_tokens = num_seqs;
  }
  for (const std::vector<std::int32_t>& tokens : new_tokens)
    for (std::size_t i = 0; i < tokens.size(); ++i) std::cout << tokens[i] << (i + 1 < tokens.size() ? ' ' : '\n');
  return 0;
} catch (const std::exception& error) {
  std::cerr << "embed_deltaic: " << error.what() << '\n';
  return 1;
}

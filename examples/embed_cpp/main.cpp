// Greedy decoding of one sequence with deltaic embedded in C++: no Python in the process.
//   embed_deltaic CHECKPOINT NUM_TOKENS TOKEN_ID...
#include <cstdlib>
#include <exception>
#include <iostream>

#include <deltaic/cache.h>
#include <deltaic/config.h>
#include <deltaic/runner.h>

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: embed_deltaic CHECKPOINT NUM_TOKENS TOKEN_ID...\n";
    return 2;
  }
  const deltaic::ModelConfig model = deltaic::load_model_config(argv[1]);
  const int num_new_tokens = std::atoi(argv[2]);
  deltaic::NewRequestData request;
  request.req_id = "0";
  for (int i = 3; i < argc; ++i) request.prompt_token_ids.push_back(std::atoi(argv[i]));
  const int num_prompt_tokens = static_cast<int>(request.prompt_token_ids.size());
  const int max_model_len = num_prompt_tokens + num_new_tokens;

  // One sequence: all its blocks at once, nothing to schedule.
  deltaic::MemoryPlanOptions memory;
  memory.memory_bytes = std::int64_t{256} << 20;
  memory.max_model_len = max_model_len;
  memory.max_num_seqs = 1;
  memory.enable_prefix_caching = false;
  const deltaic::KVCacheConfig caches = deltaic::plan_kv_cache(model, memory);
  deltaic::CacheManager cache(
      {.num_blocks = caches.num_blocks, .block_size = memory.block_size, .enable_prefix_caching = false});
  cache.add_request(request.req_id, request.prompt_token_ids);
  request.block_ids.assign(caches.groups.size(), {});
  request.block_ids[0] = cache.admit(request.req_id, {}, max_model_len).value();
  request.sampling_params.temperature = 0.0F;

  deltaic::ModelRunner runner(
      argv[1], caches, {.max_num_reqs = 1, .max_model_len = max_model_len, .max_num_batched_tokens = max_model_len});
  deltaic::SchedulerOutput step;
  step.scheduled_new_reqs = {request};
  step.num_scheduled_tokens[request.req_id] = step.total_num_scheduled_tokens = num_prompt_tokens;
  for (int n = 0; n < num_new_tokens; ++n) {
    runner.execute_model(step);
    const auto output = runner.sample_tokens();
    std::cout << output.sampled_token_ids[0][0] << (n + 1 < num_new_tokens ? ' ' : '\n') << std::flush;

    step = {};
    step.scheduled_cached_reqs = {.req_ids = {request.req_id},
                                  .num_computed_tokens = {num_prompt_tokens + n},
                                  .num_output_tokens = {n + 1},
                                  .new_block_ids = {std::nullopt},
                                  .resumed_req_ids = {}};
    step.num_scheduled_tokens[request.req_id] = step.total_num_scheduled_tokens = 1;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "embed_deltaic: " << error.what() << '\n';
  return 1;
}

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <deltaic/sampling_params.h>

// All that crosses between the scheduler and the core in a step. The names are vLLM V1's.

namespace deltaic {

// A request that the runner has not seen, or that comes back after a preemption.
struct NewRequestData {
  std::string req_id;
  std::vector<std::int32_t> prompt_token_ids;
  SamplingParams sampling_params;
  // One list a KV-cache group, in the order of KVCacheConfig::groups. That of the target's attention group counts; the
  // others may be empty: the runner gives running slots itself, and a draft group uses the target's blocks.
  std::vector<std::vector<int>> block_ids;
  int num_computed_tokens = 0;                  // tokens that a prefix hit gives
  std::vector<std::int32_t> prefill_token_ids;  // prompt + output known at admission; empty: the prompt
};

// What changed for the requests that the runner knows. Parallel arrays.
struct CachedRequestData {
  std::vector<std::string> req_ids;
  std::vector<int> num_computed_tokens;  // before this step
  std::vector<int> num_output_tokens;    // as the scheduler counts: the runner forgets others; or empty: none
  // Blocks to append, a list a group; nullopt: none. Or empty: none for anyone.
  std::vector<std::optional<std::vector<std::vector<int>>>> new_block_ids;
  // Ids whose blocks replace the row's instead of being appended. Our scheduler sends them as new instead.
  std::vector<std::string> resumed_req_ids;
};

enum class StateCopyKind : std::uint8_t {
  hit,      // snapshot slot -> the request's running slot, before the forward
  snapshot  // the request's running slot -> snapshot slot, after the forward
};

struct StateCopy {
  std::string req_id;
  StateCopyKind kind = StateCopyKind::hit;
  int snapshot_slot = 0;  // numbered after the running slots: >= KVCacheConfig::num_running_slots
  int num_tokens = 0;     // tokens whose state the snapshot holds
};

struct SchedulerOutput {
  std::vector<NewRequestData> scheduled_new_reqs;
  CachedRequestData scheduled_cached_reqs;
  std::unordered_map<std::string, int> num_scheduled_tokens;  // req_id -> tokens of this step, drafts included
  int total_num_scheduled_tokens = 0;
  // req_id -> the drafts among its scheduled tokens, the last ones; -1: a placeholder. With async_input_combine it
  // stands for the draft that the runner's last step made there, else (and where there is none) it is never accepted.
  std::map<std::string, std::vector<std::int32_t>> scheduled_spec_decode_tokens;
  std::optional<int> num_drafts;  // drafts that the step makes for each request; none: num_speculative_tokens
  std::vector<std::string> finished_req_ids;
  std::vector<std::string> preempted_req_ids;
  std::vector<StateCopy> state_copies;
};

// Natural log probabilities of one token position, taken from the raw logits. The first entry is the token itself; the
// others are the top ones, best first (the token may be among them again).
struct TokenLogprobs {
  std::vector<std::int32_t> token_ids;
  std::vector<float> logprobs;
  int rank = 0;  // of the token itself, from 1
};

struct ModelRunnerOutput {
  std::vector<std::string> req_ids;  // in batch order
  std::unordered_map<std::string, int> req_id_to_index;
  // A list a request: empty for a partial prefill and for a failed request, several where drafts were accepted.
  std::vector<std::vector<std::int32_t>> sampled_token_ids;
  // What the draft module puts behind them, a list a request; empty where it does not run.
  std::vector<std::vector<std::int32_t>> draft_token_ids;
  // Where asked for: a list a request, an entry a sampled token.
  std::map<std::string, std::vector<TokenLogprobs>> logprobs;
  // Where asked for: the entries of the prompt positions that this step computed. Entry i of the whole prompt is
  // about token i + 1, so the first token has none.
  std::map<std::string, std::vector<TokenLogprobs>> prompt_logprobs;
  // Requests whose logits were not finite: they must be failed, the others are unharmed.
  std::vector<std::string> failed_req_ids;
};

}  // namespace deltaic

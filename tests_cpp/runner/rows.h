#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "cpp/src/runner/input_batch.h"

namespace deltaic::test {

inline std::vector<std::int32_t> iota_tokens(int count, int first = 0) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

struct RowSpec {
  std::string req_id;
  int num_prompt_tokens = 0;
  int num_tokens = 0;  // 0: the prompt
  int num_computed_tokens = 0;
  int num_scheduled_tokens = 0;
  int num_draft_tokens = 0;
};

inline BatchRow make_row(const RowSpec& spec) {
  BatchRow row;
  row.req_id = spec.req_id;
  row.token_ids = iota_tokens(spec.num_tokens > 0 ? spec.num_tokens : spec.num_prompt_tokens);
  row.num_prompt_tokens = spec.num_prompt_tokens;
  row.prefill_length = row.num_tokens();
  row.num_computed_tokens = spec.num_computed_tokens;
  row.num_scheduled_tokens = spec.num_scheduled_tokens;
  row.num_draft_tokens = spec.num_draft_tokens;
  return row;
}

}  // namespace deltaic::test

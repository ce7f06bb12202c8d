#include "cpp/src/ops/verify_drafts.h"

#include <utility>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/sampler.h"

namespace deltaic::ops {
namespace {

void check_row(const DraftRow& row, std::size_t index) {
  const auto num_outputs = static_cast<std::int64_t>(row.output_token_ids.size());
  DELTAIC_CHECK(row.num_drafts >= 0 && row.num_drafts <= num_outputs, "row ", index, " has ", row.num_drafts,
                " drafts and ", num_outputs, " tokens that should end with them");
  DELTAIC_CHECK(row.logits.rank == 2 && row.logits.shape[0] == 1 + row.num_drafts && row.logits.is_contiguous(), "row ",
                index, ": logits must be [", 1 + row.num_drafts, ", vocab_size] and contiguous, have rank ",
                row.logits.rank, " and ", row.logits.shape[0], " rows");
}

VerifiedTokens verify_row(const Context& ctx, const DraftRow& row) {
  VerifiedTokens result;
  const std::int64_t vocab_size = row.logits.shape[1];
  const std::size_t num_committed = row.output_token_ids.size() - static_cast<std::size_t>(row.num_drafts);
  for (int j = 0; j <= row.num_drafts; ++j) {
    const SamplerRow position{
        .logits = row.logits.slice(j, j + 1).reshape({vocab_size}),
        .params = row.params,
        .prompt_token_ids = row.prompt_token_ids,
        .output_token_ids = row.output_token_ids.first(num_committed + static_cast<std::size_t>(j)),
        .seed = row.seed};
    std::vector<SampledToken> sampled = sample(ctx, {&position, 1});
    SampledToken& token = sampled.front();
    if (!token.is_finite) return {.token_ids = {}, .logprobs = {}, .is_finite = false};
    result.token_ids.push_back(token.token_id);
    if (token.logprobs) result.logprobs.push_back(*std::move(token.logprobs));
    if (j == row.num_drafts || token.token_id != row.output_token_ids[num_committed + static_cast<std::size_t>(j)])
      break;
  }
  return result;
}

}  // namespace

std::vector<VerifiedTokens> verify_drafts(const Context& ctx, std::span<const DraftRow> rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) check_row(rows[i], i);
  std::vector<VerifiedTokens> result(rows.size());
  Context in_caller = ctx;
  in_caller.threads = nullptr;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
      result[i] = verify_row(in_caller, rows[i]);
  };
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  if (ctx.threads == nullptr) {
    body(0, num_rows);
  } else {
    ctx.threads->parallel_for(num_rows, 1, body);
  }
  return result;
}

}  // namespace deltaic::ops

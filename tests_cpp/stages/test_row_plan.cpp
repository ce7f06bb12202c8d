#include <vector>

#include <deltaic/error.h>
#include <deltaic/step_hook.h>
#include <doctest/doctest.h>

using namespace deltaic;

namespace {

StepRow decode(const char* req_id, int first_token) {
  return {
      .req_id = req_id, .first_token = first_token, .num_tokens = 1, .num_prompt_tokens = 5, .num_computed_tokens = 5};
}
StepRow prefill(const char* req_id, int first_token, int num_tokens) {
  return {.req_id = req_id, .first_token = first_token, .num_tokens = num_tokens, .num_prompt_tokens = 9};
}

}  // namespace

TEST_CASE("only neighbouring decode rows share a run, and all of them a call of the predictor") {
  const std::vector<StepRow> rows{decode("a", 0), decode("b", 1), prefill("c", 2, 1), decode("d", 3)};
  const RowPlan plan = plan_rows(rows, 4, {.has_batched_hook = true, .has_predictor = true});
  REQUIRE(plan.runs.size() == 3);
  CHECK((plan.runs[0].first_row == 0 && plan.runs[0].num_rows == 2 && plan.runs[0].is_batched));
  CHECK((plan.runs[1].first_row == 2 && plan.runs[1].num_rows == 1 && !plan.runs[1].is_batched));
  CHECK((plan.runs[2].first_row == 3 && plan.runs[2].num_rows == 1 && plan.runs[2].is_batched));
  CHECK(plan.predictor_rows == std::vector<int>{0, 1, 3});
}

TEST_CASE("without hooks every row stands alone") {
  const std::vector<StepRow> rows{decode("a", 0), decode("b", 1)};
  const RowPlan plan = plan_rows(rows, 2, {});
  CHECK(plan.runs.size() == 2);
  CHECK(plan.predictor_rows.empty());
  CHECK(plan_rows({}, 0, {}).runs.empty());
}

TEST_CASE("rows with gaps, overlaps or tokens out of range are refused") {
  const auto plan = [](std::vector<StepRow> rows, int num_tokens) {
    plan_rows(rows, num_tokens, {.has_batched_hook = true});
  };
  CHECK_THROWS_AS(plan({decode("a", 0), decode("b", 2)}, 3), Error);
  CHECK_THROWS_AS(plan({decode("a", 1), decode("b", 0)}, 3), Error);
  CHECK_THROWS_AS(plan({decode("a", 0), decode("b", 0)}, 3), Error);
  CHECK_THROWS_AS(plan({decode("a", -1)}, 3), Error);
  CHECK_THROWS_AS(plan({prefill("a", 0, 0)}, 3), Error);
  CHECK_THROWS_AS(plan({prefill("a", 0, 4)}, 3), Error);
}

#include "cpp/src/models/mtp_module.h"

#include <cmath>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/models/dense_draft.h"
#include "tests_cpp/support/tiny_model.h"

using namespace deltaic;
using test::make_tiny_model;
using test::TinyModel;
using Tokens = std::vector<std::int32_t>;

namespace {

struct Loaded {
  std::shared_ptr<const DecoderWeights> weights;
  std::shared_ptr<const MtpWeights> mtp;
};

Loaded load(const TinyModel& model) {
  const Checkpoint checkpoint = Checkpoint::from_memory(model.tensors);
  auto weights = load_decoder_weights(model.config, checkpoint);
  auto mtp = load_mtp_weights(model.config, checkpoint, *weights);
  return {std::move(weights), std::move(mtp)};
}

DenseDraftOutput draft(const TinyModel& model, const Tokens& tokens, std::int32_t next, int num_drafts) {
  ThreadPool threads(2);
  const auto [weights, mtp] = load(model);
  return dense_draft(model.config, weights, mtp, {.device = {}, .stream = {}, .threads = &threads}, tokens, next,
                     num_drafts);
}

}  // namespace

TEST_CASE("drafts are finite, differ by token, and a longer chain begins with a shorter one") {
  for (const Architecture architecture : {Architecture::qwen3_next, Architecture::qwen3_5, Architecture::qwen3_5_moe}) {
    CAPTURE(name(architecture));
    const TinyModel model = make_tiny_model(architecture, {.mtp = true});
    const auto one = draft(model, {1, 2, 3, 4, 5}, 6, 1), three = draft(model, {1, 2, 3, 4, 5}, 6, 3);
    for (const float logit : three.logits) REQUIRE(std::isfinite(logit));
    CHECK(Tokens(three.token_ids.begin(), three.token_ids.begin() + 1) == one.token_ids);
    CHECK(std::equal(one.logits.begin(), one.logits.end(), three.logits.begin()));
    CHECK(three.hidden.size() == static_cast<std::size_t>(5 * model.config.hidden_size));
    CHECK(draft(model, {1, 2, 3, 4, 5}, 7, 1).logits != one.logits);
    CHECK(draft(model, {9, 2, 3, 4, 5}, 6, 1).logits != one.logits);
  }
}

TEST_CASE("a checkpoint without the module, or with more than one layer, is refused") {
  const TinyModel without = make_tiny_model(Architecture::qwen3_5);
  CHECK_THROWS_WITH_AS(load(without), doctest::Contains("0 layers of a draft module"), Unsupported);
  TinyModel two = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  two.set("mtp.layers.1.input_layernorm.weight", {32}, std::vector<float>(32));
  CHECK_THROWS_WITH_AS(load(two), doctest::Contains("2 layers of a draft module"), Unsupported);
  TinyModel partial = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  partial.tensors.erase("mtp.fc.weight");
  CHECK_THROWS_WITH_AS(load(partial), doctest::Contains("mtp.fc.weight is missing"), InvalidArgument);
}

TEST_CASE("a chain of no drafts is refused") {
  const TinyModel model = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  CHECK_THROWS_AS(draft(model, {1, 2}, 3, 0), InvalidArgument);
}

#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "tests_cpp/runner/draft_driver.h"
#include "tests_cpp/runner/request_names.h"

using namespace deltaic;
using namespace deltaic::test;
using Script = DraftEngine::Script;

namespace {

DraftEngine make_engine(const TinyModel& model, const CacheChoice& choice = {}, int max_model_len = 64,
                        bool enforce_eager = true) {
  RunnerOptions options = draft_options(max_model_len);
  options.enforce_eager = enforce_eager;
  return DraftEngine(ModelRunner(model.config, model.tensors, draft_caches(model, choice), options));
}

// A runner reads its weights from the model's memory.
const TinyModel& dense_hybrid() {
  static const TinyModel model = tiny_qwen3_5();
  return model;
}
const TinyModel& experts_hybrid() {
  static const TinyModel model = tiny_qwen3_next();
  return model;
}
const TinyModel& attention_alone() {
  static const TinyModel model = tiny_qwen3();
  return model;
}
// On CUDA sums depend on how many tokens a step has.
bool is_same(float a, float b) { return on_cuda() ? std::fabs(a - b) < 1e-4F * (1.0F + std::fabs(b)) : a == b; }
const TinyModel* const kHybrids[] = {&dense_hybrid(), &experts_hybrid()};
const TinyModel* const kModels[] = {&dense_hybrid(), &experts_hybrid(), &attention_alone()};

}  // namespace

TEST_CASE("greedy tokens are those without drafts at every position of a block and for every accepted count") {
  for (const TinyModel* model : kModels) {
    constexpr int kBlock = 4;
    std::set<std::tuple<int, int, int>> seen;  // position in the block, drafts, accepted
    std::mt19937 random(5);
    DraftEngine engine = make_engine(*model, {.block_size = kBlock, .num_blocks = 200}, 400, /*enforce_eager=*/false);
    for (int round = 0; round < 4; ++round) {
      engine.add("a", prompt_of(3 + round, round), 130);
      engine.add("b", prompt_of(9 - round, 10 + round), 130);
      engine.step_all({});
      while (engine.requests["a"].num_output() < 120 && engine.requests["b"].num_output() < 120) {
        std::map<std::string, Script> scripts;
        for (auto& [req_id, request] : engine.requests) {
          Script& script = scripts[req_id];
          script.num_drafts = static_cast<int>(random() % (kDrafts + 1));
          script.num_right = static_cast<int>(random() % static_cast<unsigned>(script.num_drafts + 1));
          seen.insert({request.num_computed % kBlock, script.num_drafts, script.num_right});
        }
        if (random() % 8 == 0) scripts.erase(random() % 2 == 0 ? "a" : "b");  // alive, but it does not run
        engine.step(scripts);
      }
      engine.finish("a"), engine.finish("b");
    }
    CHECK(seen.size() == kBlock * (1 + 2 + 3 + 4));
  }
}

TEST_CASE("D40: a step without drafts behind an acceptance of three starts from the third state") {
  for (const TinyModel* model : kModels) {
    DraftEngine engine = make_engine(*model);
    engine.add("a", prompt_of(5, 1)), engine.add("b", prompt_of(6, 2));
    engine.step_all({});
    for (int round = 0; round < 3; ++round) {
      engine.step_all({.num_drafts = 3, .num_right = 2});
      engine.step_all({.num_drafts = 0});
      engine.step_all({.num_drafts = 0});
      engine.step_all({.num_drafts = 2, .num_right = 1});
    }
  }
}

TEST_CASE("D41: rows without a draft next to a prefill") {
  DraftEngine engine = make_engine(dense_hybrid());
  engine.add("a", prompt_of(5, 1)), engine.add("b", prompt_of(6, 2));
  engine.step_all({});
  engine.step_all({.num_drafts = 3, .num_right = 3});
  engine.add("c", prompt_of(7, 3));
  engine.step_all({.num_drafts = 0});
  const GdnMetadataView& gdn = engine.runner.last_gdn_meta();
  CHECK(std::tuple(gdn.num_decodes, gdn.num_spec_decodes, gdn.num_prefills) == std::tuple(2, 0, 1));
  CHECK(gdn.num_accepted_tokens == std::vector<std::int32_t>{4, 4, 0});
  engine.step_all({.num_drafts = 3, .num_right = 1});
}

TEST_CASE("D42: a part of a prompt of 1 + S tokens is a prefill, and its state is there for the next part") {
  for (const int length : {4, 8, 13, 12 + 4}) {
    DraftEngine engine = make_engine(dense_hybrid());
    engine.add("running", prompt_of(5, 1));
    engine.step_all({});
    engine.add("a", prompt_of(length, 2));
    const int first = length % 4 == 0 ? length - 4 : length - 1;
    const auto decoding = Script{.num_drafts = 3, .num_right = 2};
    if (first > 0) engine.step({{"running", decoding}, {"a", {.num_prefill = first}}});
    engine.step({{"running", decoding}, {"a", {.num_prefill = 4}}});
    if (length % 4 == 0) CHECK(engine.runner.last_gdn_meta().num_prefills == 1);
    engine.step_all(decoding), engine.step_all(decoding);
  }
}

TEST_CASE("D43: a row without drafts next to one with drafts") {
  DraftEngine engine = make_engine(dense_hybrid(), {.num_blocks = 80}, 100);
  engine.add("a", prompt_of(64, 1), 10), engine.add("b", prompt_of(19, 2), 20);
  engine.step_all({});
  engine.step({{"a", {}}, {"b", {.num_drafts = 2, .num_right = 2}}});
  const GdnMetadataView& gdn = engine.runner.last_gdn_meta();
  CHECK(std::tuple(gdn.num_decodes, gdn.num_spec_decodes, gdn.num_prefills) == std::tuple(1, 1, 0));
  CHECK(std::tuple(gdn.num_decode_tokens, gdn.num_spec_decode_tokens) == std::tuple(1, 3));
  engine.step_all({.num_drafts = 3, .num_right = 1});
}

TEST_CASE(
    "D14, D45, D46: sixteen rows with drafts beside four prefills, all that there is room for, give what each gives "
    "alone") {
  for (const TinyModel* model : kHybrids) {
    RunnerOptions options = draft_options(330);
    options.max_num_reqs = 20, options.max_num_batched_tokens = 2000;
    DraftEngine engine(ModelRunner(model->config, model->tensors, draft_caches(*model, {.num_blocks = 900}), options));
    for (int i = 0; i < 16; ++i) engine.add(numbered("spec", i), prompt_of(3 + i, i), 16);
    engine.step_all({});
    for (int i = 0; i < 4; ++i) engine.add(numbered(i % 2 == 0 ? "a" : "z", i), prompt_of(300, 40 + i), 8);
    std::map<std::string, Script> scripts;
    for (const auto& [req_id, request] : engine.requests) {
      const int i = static_cast<int>(scripts.size());
      scripts[req_id] = {.num_drafts = i % 4, .num_right = i % 3, .num_prefill = i == 2 ? 150 : 0};
    }
    engine.step(scripts);  // prefills first, last and between, in every order of names
    engine.step_all({.num_drafts = 3, .num_right = 2});
    engine.step_all({.num_drafts = 2, .num_right = 0});
  }
}

TEST_CASE("D47: the first verified step of a request that joins starts from an accepted count of one") {
  DraftEngine engine = make_engine(dense_hybrid(), {.num_blocks = 200}, 64);
  for (int i = 0; i < 7; ++i) engine.add(numbered("old", i), prompt_of(4 + i, i));
  engine.step_all({});
  for (int i = 0; i < 3; ++i) engine.step_all({.num_drafts = 3, .num_right = 3});
  engine.add("new", prompt_of(6, 20));
  engine.step_all({.num_drafts = 3, .num_right = 3});
  engine.step_all({.num_drafts = 3, .num_right = 3});
  const int row = engine.runner.input_batch().find("new");
  CHECK(engine.runner.last_gdn_meta().num_accepted_tokens[static_cast<std::size_t>(row)] == 1);
}

TEST_CASE("D48, D49, D68: a slot's next owner finds neither accepted count, nor tokens, nor state of the last one") {
  // The last owner ends after every accepted count and every phase within a block.
  const TinyModel& model = dense_hybrid();
  for (int accepted = 1; accepted <= 1 + kDrafts; ++accepted)
    for (int phase = 0; phase < 4; ++phase) {
      DraftEngine engine = make_engine(model, {.num_blocks = 20, .num_snapshot_slots = 1});
      engine.add("old", prompt_of(4 + phase, 3));
      engine.step_all({});
      engine.step_all({.num_drafts = 3, .num_right = accepted - 1});
      engine.finish("old");
      engine.add("new", prompt_of(9, 4));
      engine.step_all({.num_prefill = 8});
      engine.step_all({});
      engine.step_all({.num_drafts = 3, .num_right = 2});
      CHECK(engine.runner.gdn_state_slots() == std::map<std::string, int>{{"new", 0}});
      CHECK(engine.runner.last_gdn_meta().num_accepted_tokens == std::vector<std::int32_t>{1});
      const auto& request = engine.requests["new"];
      CHECK(engine.runner.last_step().input_token_ids[0] == request.greedy[0]);
      CHECK(engine.runner.last_step().input_token_ids[1] == request.greedy[1]);
      engine.step_all({.num_drafts = 1, .num_right = 0});
    }
}

TEST_CASE(
    "D48, D49: a slot's next owner whose first step is a decode behind a hit starts from an accepted count of one") {
  for (int accepted = 1; accepted <= 1 + kDrafts; ++accepted)
    for (const bool has_drafts : {false, true}) {
      CAPTURE(accepted);
      CAPTURE(has_drafts);
      DraftEngine engine = make_engine(dense_hybrid(), {.block_size = 4, .num_blocks = 40, .num_snapshot_slots = 1});
      engine.add("source", prompt_of(9, 1)), engine.add("old", prompt_of(5, 3));
      engine.copies = {{"source", StateCopyKind::snapshot, 8, 8}};
      engine.step_all({.num_prefill = 8});
      engine.step({{"old", {.num_drafts = 3, .num_right = accepted - 1}}});
      engine.finish("old");
      engine.add("new", prompt_of(9, 1));
      auto& request = engine.requests["new"];
      const auto& source = engine.requests["source"].blocks;
      request.blocks = request.spare_blocks = {source[0], source[1]};
      request.num_computed = 8;
      if (has_drafts) request.prefill_length = 8;
      engine.copies = {{"new", StateCopyKind::hit, 8, 8}};
      engine.step({{"new", {.num_drafts = 3, .num_right = 2}}});
      CHECK(engine.runner.gdn_state_slots() == std::map<std::string, int>{{"new", 0}, {"source", 1}});
      CHECK(engine.runner.last_step().input_token_ids[0] == prompt_of(9, 1)[8]);
      const int row = engine.runner.input_batch().find("new");
      const auto num_accepted = [&] {
        return engine.runner.last_gdn_meta().num_accepted_tokens[static_cast<std::size_t>(row)];
      };
      if (has_drafts) CHECK(num_accepted() == 1);
      engine.step({{"new", {.num_drafts = 3, .num_right = 1}}});
      CHECK(num_accepted() == (has_drafts ? 3 : 1));
      engine.step({{"new", {.num_drafts = 2, .num_right = 2}}});
      CHECK(num_accepted() == 2);
    }
}

TEST_CASE(
    "D51: the last token of a prompt with placeholders behind it is verified, and the state is that of the prompt") {
  const TinyModel& model = dense_hybrid();
  DraftEngine engine = make_engine(model, {.block_size = 4, .num_blocks = 40, .num_snapshot_slots = 1});
  engine.add("a", prompt_of(9, 1)), engine.add("b", prompt_of(9, 1));
  engine.requests["b"].tokens = engine.requests["a"].tokens;
  engine.copies = {{"a", StateCopyKind::snapshot, 8, 8}};
  engine.step({{"a", {.num_prefill = 8}}});
  engine.step({{"a", {}}});
  // b hits the prefix of 8 tokens, and joins with its last token and placeholders.
  auto& b = engine.requests["b"];
  Step step(engine.runner);
  b.blocks = {engine.requests["a"].blocks[0], engine.requests["a"].blocks[1]};
  const std::vector<int> shared = b.blocks, added = engine.grow(b, 9 + kDrafts);
  std::vector<int> blocks = shared;
  blocks.insert(blocks.end(), added.begin(), added.end());
  step.admit("b", b.tokens, blocks, 1 + kDrafts, greedy(), 8);
  step.output.scheduled_spec_decode_tokens["b"] = {-1, -1, -1};
  step.copy("b", StateCopyKind::hit, 8, 8);
  const auto output = run_step(engine.runner, step);
  CHECK(output.sampled_token_ids[0] == Tokens{b.greedy[0]});
  CHECK(engine.runner.last_gdn_meta().num_spec_decodes == 1);
  b.tokens.push_back(b.greedy[0]);
  b.num_computed = 9, b.is_known = true;
  engine.step_all({.num_drafts = 3, .num_right = 2});
  engine.step_all({.num_drafts = 3, .num_right = 3});
}

TEST_CASE("D52: rows with drafts beside the parts of a long prompt") {
  DraftEngine engine = make_engine(dense_hybrid(), {.num_blocks = 200}, 200);
  engine.add("long", prompt_of(160, 1), 4);
  for (int part = 0; part < 8; ++part) {
    engine.add(numbered("short", part), prompt_of(2 + part, 20 + part), 50);
    engine.step_all({.num_drafts = 3, .num_right = part % 4, .num_prefill = 20});
    if (part >= 6) engine.finish(numbered("short", part - 6));
  }
}

TEST_CASE("D53: eight rows of two tokens and one of one are all decodes") {
  RunnerOptions options = draft_options();
  options.max_num_reqs = 9;
  const TinyModel& model = dense_hybrid();
  DraftEngine engine(ModelRunner(model.config, model.tensors, draft_caches(model, {.num_blocks = 100}), options));
  std::map<std::string, Script> scripts;
  for (int i = 0; i < 9; ++i) {
    engine.add(std::to_string(i), prompt_of(4, i), 8);
    scripts[std::to_string(i)] = {.num_drafts = i < 8 ? 1 : 0, .num_right = i % 2};
  }
  engine.step_all({});
  engine.step(scripts);
  CHECK(engine.runner.last_gdn_meta().num_prefills == 0);
  CHECK(engine.runner.last_gdn_meta().num_spec_decodes == 8);
  CHECK(engine.runner.last_gdn_meta().num_decodes == 1);
}

TEST_CASE("D55: placeholders are never accepted, and feed a valid id") {
  DraftEngine engine = make_engine(dense_hybrid());
  engine.add("a", prompt_of(5, 1));
  engine.step_all({});
  const auto& greedy_tokens = engine.requests["a"].greedy;
  Step step(engine.runner);
  step.run("a", 5, 4, engine.grow(engine.requests["a"], 9), 1);
  step.output.scheduled_spec_decode_tokens["a"] = {greedy_tokens[1], -1, greedy_tokens[3]};
  CHECK(run_step(engine.runner, step).sampled_token_ids[0] == Tokens{greedy_tokens[1], greedy_tokens[2]});
  CHECK(engine.runner.last_step().input_token_ids[2] == 0);
}

TEST_CASE("D60: a preempted request comes back without its drafts") {
  for (const int num_right : {0, 1, 3}) {
    DraftEngine engine = make_engine(dense_hybrid());
    engine.add("a", prompt_of(5, 1)), engine.add("b", prompt_of(7, 2));
    engine.step_all({});
    engine.step_all({.num_drafts = 3, .num_right = num_right});
    engine.preempt("a");
    engine.step({{"b", {.num_drafts = 3, .num_right = 1}}});
    engine.step_all({.num_drafts = 2, .num_right = 2});
    engine.step_all({.num_drafts = 3, .num_right = 2});
  }
}

TEST_CASE("a snapshot within a verified step holds the state after exactly its tokens") {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (int accepted = 1; accepted <= 1 + kDrafts; ++accepted)
      for (int column = 0; column <= kDrafts; ++column) {
        CAPTURE(accepted);
        CAPTURE(column);
        // The first verified step leaves `accepted`; the second passes 16 tokens at its token `column`.
        const TinyModel& model = dense_hybrid();
        DraftEngine engine =
            make_engine(model, {.block_size = 4, .num_blocks = 60, .temporal_dtype = dtype, .num_snapshot_slots = 1});
        const int first_slot = 8;
        engine.add("a", prompt_of(16 - column - 1 - accepted, 1), 20);
        engine.step_all({});
        engine.step_all({.num_drafts = 3, .num_right = accepted - 1});
        REQUIRE(engine.requests["a"].num_computed == 15 - column);
        engine.copies = {{"a", StateCopyKind::snapshot, first_slot, 16}};
        engine.step_all({.num_drafts = 3, .num_right = 3});
        const Tokens tokens = engine.requests["a"].tokens;
        // Its state is what a prefill of the same 16 tokens leaves.
        ModelRunner& runner = engine.runner;
        // With 16 bits only the inputs of the first layer are the same.
        const std::size_t layer = dtype == DType::f32 ? 1 : 0;
        const auto& state = runner.gdn_state()[layer];
        ModelRunner other(model.config, model.tensors, cache_config(model.config, {.block_size = 4}), small_options());
        Step prefill(other);
        prefill.admit("a", Tokens(tokens.begin(), tokens.begin() + 16), {1, 2, 3, 4}, 16);
        run_step(other, prefill);
        const auto& expected = other.gdn_state()[layer];
        const auto conv = host_row<float>(state.conv, first_slot), expected_conv = host_row<float>(expected.conv, 0);
        for (int channel = 0; channel < model.config.conv_dim(); ++channel)
          for (int j = 0; j < 3; ++j)
            REQUIRE(is_same(conv[static_cast<std::size_t>(channel * (3 + kDrafts) + j)],
                            expected_conv[static_cast<std::size_t>(channel * 3 + j)]));
        if (dtype != DType::f32) continue;
        const auto temporal = host_row<float>(state.temporal, first_slot),
                   expected_temporal = host_row<float>(expected.temporal, 0);
        for (std::size_t i = 0; i < expected_temporal.size(); ++i) REQUIRE(is_same(temporal[i], expected_temporal[i]));
      }
}

TEST_CASE("a snapshot that a step does not reach, or began behind, is not taken by it") {
  DraftEngine engine = make_engine(dense_hybrid(), {.num_snapshot_slots = 2});
  engine.add("a", prompt_of(6, 1));
  engine.step_all({});
  engine.step_all({.num_drafts = 3, .num_right = 3});  // computed: 10
  const int slot = 8;
  engine.copies = {{"a", StateCopyKind::snapshot, slot, 8}};
  engine.step_all({.num_drafts = 1, .num_right = 0});
  const auto& state = engine.runner.gdn_state()[0].temporal;
  CHECK(std::isnan(host_row<float>(state, slot, 1)[0]));
  Step hit(engine.runner);
  hit.admit("b", prompt_of(9, 1), {30, 31, 32}, 1, greedy(), 8).prefill_token_ids = {};
  hit.copy("b", StateCopyKind::hit, slot, 8);
  CHECK_THROWS_WITH_AS(engine.runner.execute_model(hit.output), doctest::Contains("holds nothing"), InvalidArgument);
}

TEST_CASE("a scheduler that is ahead counts all drafts as accepted, and the runner knows better") {
  for (const TinyModel* model : kModels)
    for (int first = 0; first <= kDrafts; ++first)
      for (int second = 0; second <= kDrafts; ++second) {
        RunnerOptions options = draft_options();
        options.async_input_combine = true;
        DraftEngine engine(ModelRunner(model->config, model->tensors, draft_caches(*model), options));
        engine.add("a", prompt_of(5, 1));
        auto& request = engine.requests["a"];
        engine.step_all({});
        // Each step is scheduled from what the step before the last gave.
        int begin = 5, num_output = 1;
        int scheduled = begin;
        for (const int num_right : {first, second, 1, 0, 2, 3}) {
          Step step(engine.runner);
          step.run("a", scheduled, 1 + kDrafts, engine.grow(request, scheduled + 1 + kDrafts), scheduled - 5 + 1);
          step.output.scheduled_spec_decode_tokens["a"] = DraftEngine::drafts(request, kDrafts, num_right);
          const Tokens sampled = run_step(engine.runner, step).sampled_token_ids[0];
          const auto wanted = request.greedy.begin() + num_output;
          CHECK(sampled == Tokens(wanted, wanted + num_right + 1));
          CHECK(engine.runner.last_step().positions[0] == begin);
          scheduled = begin + 1 + kDrafts;
          begin += num_right + 1, num_output += num_right + 1;
          request.tokens.insert(request.tokens.end(), sampled.begin(), sampled.end());
        }
      }
}

TEST_CASE("a verified step that does not fit is refused, and changes nothing") {
  DraftEngine engine = make_engine(dense_hybrid());
  engine.add("a", prompt_of(5, 1));
  engine.step_all({});
  auto& request = engine.requests["a"];
  const std::vector<int> blocks = engine.grow(request, 12);
  const auto refuses = [&](const char* message, auto change) {
    Step step(engine.runner);
    step.run("a", 5, 3, blocks, 1);
    step.output.scheduled_spec_decode_tokens["a"] = {1, 2};
    change(step);
    CHECK_THROWS_WITH_AS(engine.runner.execute_model(step.output), doctest::Contains(message), InvalidArgument);
  };
  refuses("request a has 4 draft tokens, num_speculative_tokens is 3",
          [](Step& step) { step.output.scheduled_spec_decode_tokens["a"] = {1, 2, 3, 4}; });
  refuses("one more than drafts is needed", [](Step& step) { step.output.scheduled_spec_decode_tokens["a"] = {1}; });
  refuses("one more than drafts is needed", [](Step& step) { step.output.scheduled_spec_decode_tokens["b"] = {1}; });
  refuses("request a has the draft token 64, outside the vocabulary of 64",
          [](Step& step) { step.output.scheduled_spec_decode_tokens["a"] = {1, 64}; });
  refuses("request a has the draft token -2",
          [](Step& step) { step.output.scheduled_spec_decode_tokens["a"] = {-2, 1}; });
  refuses("request a has draft tokens at token 4, before its newest, 5",
          [](Step& step) { step.output.scheduled_cached_reqs.num_computed_tokens = {4}; });
  refuses("num_drafts is 4, num_speculative_tokens is 3", [](Step& step) { step.output.num_drafts = 4; });
  engine.grow(request, 12);
  Step good(engine.runner);
  good.run("a", 5, 4, blocks, 1);
  good.output.scheduled_spec_decode_tokens["a"] = DraftEngine::drafts(request, 3, 1);
  CHECK(run_step(engine.runner, good).sampled_token_ids[0] == Tokens{request.greedy[1], request.greedy[2]});
  Step back(engine.runner);
  back.run("a", 5, 1, {}, 3);
  CHECK_THROWS_WITH_AS(engine.runner.execute_model(back.output),
                       doctest::Contains("request a goes on at token 5, its last step verified tokens from 5 on"),
                       InvalidArgument);
}

TEST_CASE("the draft module's group, marked or not, makes drafts: those of a dense chain, in any batch") {
  for (const Architecture architecture : {Architecture::qwen3, Architecture::qwen3_5, Architecture::qwen3_next})
    for (const bool is_marked : {true, false}) {
      const TinyModel model = make_tiny_model(architecture, {.mtp = true});
      KVCacheConfig caches = draft_caches(model, {}, /*makes_drafts=*/true);
      caches.groups.back().is_eagle_group = is_marked;
      DraftEngine engine(ModelRunner(model.config, model.tensors, caches, draft_options()));
      CHECK(engine.runner.full_attn_group_id() == 0);
      CHECK(engine.runner.gdn_group_id() == (architecture == Architecture::qwen3 ? -1 : 1));
      engine.add("a", prompt_of(5, 1)), engine.add("b", prompt_of(11, 2)), engine.add("c", prompt_of(7, 3));
      for (const Script script : {Script{.num_prefill = 4}, Script{.num_prefill = 4}, Script{.num_drafts = 3},
                                  Script{.num_drafts = 3, .num_right = 3}, Script{.num_drafts = 2, .num_right = 1}}) {
        for (auto& [req_id, request] : engine.requests) {  // so that the chains find room
          if (!request.is_known) continue;
          request.spare_blocks = engine.grow(request, static_cast<int>(request.tokens.size()) + 2 * kDrafts);
        }
        const ModelRunnerOutput output = engine.step_all(script);
        for (std::size_t i = 0; i < output.req_ids.size(); ++i) {
          const auto& tokens = engine.requests[output.req_ids[i]].tokens;
          const Tokens& drafts = output.draft_token_ids[i];
          CHECK(drafts.empty() == output.sampled_token_ids[i].empty());
          if (drafts.empty()) continue;
          const auto expected = engine.runner.dense_draft(std::span(tokens).first(tokens.size() - 1), tokens.back(),
                                                          static_cast<int>(drafts.size()));
          CHECK(drafts == expected.token_ids);
        }
      }
    }
}

TEST_CASE("a draft group that cannot serve is refused by name") {
  const auto refuses = [](const TinyModel& model, const char* message, auto change) {
    KVCacheConfig caches = draft_caches(model, {}, /*makes_drafts=*/true);
    change(std::get<FullAttentionSpec>(caches.groups[2].spec));
    CHECK_THROWS_WITH(ModelRunner(model.config, model.tensors, caches, draft_options()), doctest::Contains(message));
  };
  const auto nothing = [](FullAttentionSpec&) {};
  const TinyModel with_module = make_tiny_model(Architecture::qwen3_5, {.mtp = true});
  refuses(dense_hybrid(), "the checkpoint has 0 layers of a draft module", nothing);
  refuses(with_module, "block_size is 8, the target's is 4", [](FullAttentionSpec& spec) { spec.block_size = 8; });
  refuses(with_module, "num_kv_heads is 4, the model has 2", [](FullAttentionSpec& spec) { spec.num_kv_heads = 4; });
}

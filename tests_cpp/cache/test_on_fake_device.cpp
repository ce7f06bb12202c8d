#include <algorithm>
#include <deque>
#include <random>

#include <deltaic/cache.h>
#include <doctest/doctest.h>

#include "tests_cpp/cache/fake_device.h"

using namespace deltaic;
using namespace deltaic::test;

namespace {

constexpr int kBlockSize = 4, kMambaBlock = 8, kMaxRunning = 6;

struct Setup {
  int num_blocks, num_slots;
  int depth;       // steps that are scheduled before the first one's tokens are known: 2 is async
  int num_drafts;  // needs depth 1
};

// A scheduler that follows cache.h and is careless otherwise: random chunks, preemptions and ends.
class Simulation {
 public:
  using Tokens = std::vector<std::int32_t>;

  Simulation(const Setup& setup, unsigned seed)
      : setup_(setup),
        random_(seed),
        cache_({.num_blocks = setup.num_blocks,
                .block_size = kBlockSize,
                .mamba_block_size = kMambaBlock,
                .num_snapshot_slots = setup.num_slots,
                .first_snapshot_slot = 0}),
        device_(setup.num_blocks, kBlockSize, setup.num_slots) {}

  void step() {
    if (requests_.size() < 10) arrive();
    FakeDevice::Step step = schedule();
    in_flight_.push_back(std::move(step));
    if (static_cast<int>(in_flight_.size()) >= setup_.depth) {
      // The device runs the steps in order, as late as possible.
      const FakeDevice::Step oldest = std::move(in_flight_.front());
      in_flight_.pop_front();
      update(oldest, device_.run(oldest));
    }
  }

  const CacheStats& stats() const { return cache_.stats(); }
  int num_preemptions = 0, num_finished = 0, num_accepted = 0, num_hits = 0;

 private:
  struct Request {
    Tokens tokens;
    std::size_t num_prompt_tokens = 0, max_tokens = 0;
    int num_computed = 0, num_placeholders = 0, epoch = 0;
    int known_at_admission = 0;
    bool runs = false, is_new = false;
    std::vector<int> blocks, stops;
  };

  int draw(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void arrive() {
    Tokens prompt;
    if (!old_.empty() && draw(5) > 0) {
      prompt = old_[static_cast<std::size_t>(draw(static_cast<int>(old_.size())))];
      if (draw(3) == 0) prompt.resize(static_cast<std::size_t>(1 + draw(static_cast<int>(prompt.size()))));
    }
    for (int i = 1 + draw(12); i > 0; --i) prompt.push_back(draw(3));
    if (prompt.size() > 60) prompt.resize(60);
    const std::string id = std::to_string(++num_requests_);
    Request& request = requests_[id];
    request.tokens = prompt;
    request.num_prompt_tokens = prompt.size();
    request.max_tokens = prompt.size() + static_cast<std::size_t>(1 + draw(30));
    cache_.add_request(id, prompt);
    waiting_.push_back(id);
  }

  void preempt(const std::string& id) {
    Request& request = requests_[id];
    cache_.release(id);
    request.runs = false;
    request.num_computed = request.num_placeholders = 0;
    ++request.epoch;
    std::erase(running_, id);
    waiting_.insert(waiting_.begin(), id);
    ++num_preemptions;
  }

  // End of the chunk that starts at `from`.
  int chunk_end(const Request& request, int from) {
    int end = static_cast<int>(request.tokens.size()) + request.num_placeholders;
    if (end - from > 1) end = std::min(end, from + 1 + draw(30));
    for (const int stop : request.stops)
      if (from < stop && stop < end) end = stop;
    return end;
  }

  FakeDevice::Step schedule() {
    FakeDevice::Step step;
    std::map<std::string, int> ends;
    bool preempted = false;
    for (std::size_t i = 0; i < running_.size();) {
      const std::string id = running_[i];
      Request& request = requests_[id];
      const int end = chunk_end(request, request.num_computed);
      if (request.num_computed == end || draw(8) == 0) {  // left out of this step
        ++i;
        continue;
      }
      bool survives = true;
      std::optional<std::vector<int>> added;
      while (survives && !(added = cache_.extend(id, end + setup_.num_drafts))) {
        const std::string victim = running_.back();
        survives = victim != id;
        preempted = true;
        ends.erase(victim);
        preempt(victim);
      }
      if (!survives) break;
      request.blocks.insert(request.blocks.end(), added->begin(), added->end());
      ends[id] = end;
      ++i;
    }
    while (!preempted && !waiting_.empty() && running_.size() < kMaxRunning) {
      const std::string id = waiting_.front();
      Request& request = requests_[id];
      const PrefixHit hit = draw(10) == 0 ? PrefixHit{} : cache_.find_prefix(id);
      const int num_known = static_cast<int>(request.tokens.size());
      auto blocks = cache_.admit(id, hit, num_known + setup_.num_drafts);
      if (!blocks) break;
      num_hits += hit.num_tokens > 0;
      waiting_.erase(waiting_.begin());
      running_.push_back(id);
      request.blocks = *blocks;
      request.runs = request.is_new = true;
      request.num_computed = hit.num_tokens;
      request.known_at_admission = num_known;
      request.stops = {(num_known - 1) / kMambaBlock * kMambaBlock,
                       hit.num_attention_tokens / kMambaBlock * kMambaBlock};
      ends[id] = chunk_end(request, hit.num_tokens);
      if (hit.snapshot_slot >= 0) step.hits.push_back({id, hit.snapshot_slot, hit.num_tokens});
    }
    std::vector<FakeDevice::Copy> known_snapshots;
    for (const auto& [id, end] : ends) {
      Request& request = requests_[id];
      const int num_known = static_cast<int>(request.tokens.size());
      FakeDevice::Row row{
          .req_id = id,
          .is_new = request.is_new,
          .prefix = {request.tokens.begin(), request.tokens.begin() + (request.is_new ? request.num_computed : 0)},
          .start = request.num_computed,
          .tokens = {},
          .drafts = {},
          .blocks = request.blocks,
          .samples = end == num_known + request.num_placeholders};
      for (int i = request.num_computed; i < end; ++i)
        row.tokens.push_back(i < num_known ? request.tokens[static_cast<std::size_t>(i)] : -1);
      if (row.samples)
        for (int i = 0; i < setup_.num_drafts; ++i)
          row.drafts.push_back(draw(4) == 0 ? draw(3) : guess(request, row.drafts));
      request.is_new = false;
      request.num_computed = end;
      cache_.publish(id, end + static_cast<int>(row.drafts.size()));
      // The boundary that the step may reach: for certain without drafts.
      const int boundary = (end + static_cast<int>(row.drafts.size())) / kMambaBlock * kMambaBlock;
      if (boundary > row.start && boundary >= end)
        if (const auto slot = cache_.reserve_snapshot(id, boundary)) {
          step.snapshots.push_back({id, *slot, boundary});
          (boundary <= std::min(end, num_known) ? known_snapshots : step.unknown_snapshots)
              .push_back({id, *slot, boundary});
        }
      if (row.samples) ++request.num_placeholders;
      step.epochs[id] = request.epoch;
      step.rows.push_back(std::move(row));
    }
    for (const auto& copy : known_snapshots) cache_.publish_snapshot(copy.req_id, copy.num_tokens);
    return step;
  }

  // A draft that the model accepts.
  static std::int32_t guess(const Request& request, const Tokens& drafts) {
    FakeDevice::State state;
    for (const std::int32_t token : request.tokens) state = state.next(token);
    for (const std::int32_t token : drafts) state = state.next(token);
    return FakeDevice::sample(state);
  }

  void update(const FakeDevice::Step& step, const FakeDevice::Output& output) {
    for (const auto& [id, epoch] : step.epochs) {
      const auto found = requests_.find(id);
      if (found == requests_.end() || found->second.epoch != epoch) continue;
      Request& request = found->second;
      if (const auto sampled = output.find(id); sampled != output.end()) {
        --request.num_placeholders;
        const Tokens& tokens = sampled->second;
        request.tokens.insert(request.tokens.end(), tokens.begin(), tokens.end());
        cache_.append_tokens(id, tokens);
        if (setup_.num_drafts > 0) {
          request.num_computed += static_cast<int>(tokens.size()) - 1;
          num_accepted += static_cast<int>(tokens.size()) - 1;
        }
      }
      cache_.publish(id, request.num_computed);
      for (const auto& copy : step.unknown_snapshots) {
        if (copy.req_id != id) continue;
        if (copy.num_tokens <= std::min(request.num_computed, static_cast<int>(request.tokens.size()))) {
          cache_.publish_snapshot(id, copy.num_tokens);
          check_snapshot(copy, request);
        } else {
          cache_.cancel_snapshot(id, copy.num_tokens);
        }
      }
      if (request.tokens.size() >= request.max_tokens || draw(60) == 0) {
        old_.push_back(request.tokens);
        if (old_.size() > 5) old_.pop_front();
        cache_.remove_request(id);
        std::erase(running_, id);
        requests_.erase(found);
        ++num_finished;
      }
    }
  }

  // T-shadow: the slot holds the state after exactly these tokens, now that the step which wrote it has run.
  void check_snapshot(const FakeDevice::Copy& copy, const Request& request) const {
    FakeDevice::State state;
    for (int i = 0; i < copy.num_tokens; ++i) state = state.next(request.tokens[static_cast<std::size_t>(i)]);
    REQUIRE(device_.snapshot(copy.slot) == state);
  }

  Setup setup_;
  std::mt19937 random_;
  CacheManager cache_;
  FakeDevice device_;
  std::deque<FakeDevice::Step> in_flight_;
  std::map<std::string, Request> requests_;
  std::vector<std::string> running_, waiting_;
  std::deque<Tokens> old_;  // what ended last
  int num_requests_ = 0;
};

}  // namespace

TEST_CASE("what is hit is what was computed: in one chunk or many, preempted, async, with drafts") {
  for (const Setup& setup : {Setup{.num_blocks = 120, .num_slots = 8, .depth = 1, .num_drafts = 0},
                             Setup{.num_blocks = 60, .num_slots = 3, .depth = 1, .num_drafts = 0},
                             Setup{.num_blocks = 60, .num_slots = 4, .depth = 2, .num_drafts = 0},
                             Setup{.num_blocks = 60, .num_slots = 2, .depth = 3, .num_drafts = 0},
                             Setup{.num_blocks = 60, .num_slots = 4, .depth = 1, .num_drafts = 3}})
    for (const unsigned seed : {1, 2}) {
      CAPTURE(setup.num_slots);
      CAPTURE(setup.depth);
      CAPTURE(setup.num_drafts);
      CAPTURE(seed);
      Simulation simulation(setup, seed);
      for (int i = 0; i < 4000; ++i) {
        CAPTURE(i);
        simulation.step();
      }
      CHECK(simulation.num_finished > 300);
      CHECK(simulation.num_hits > 50);
      CHECK(simulation.stats().num_evicted_snapshots > 20);
      if (setup.num_blocks < 100) CHECK(simulation.num_preemptions > 20);
      if (setup.num_drafts > 0) CHECK(simulation.num_accepted > 500);
    }
}

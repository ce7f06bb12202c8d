#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <deltaic/cache.h>
#include <doctest/doctest.h>

namespace deltaic::test {

// A device that stores what it should have computed instead of numbers: a token's K/V is the hash of the sequence up to
// it, a recurrent state is that hash and the token count. It reads everything that a model would read, and checks it.
class FakeDevice {
 public:
  struct State {
    int num_tokens = 0;
    std::uint64_t hash = 0;
    State next(std::int32_t token) const {
      return {num_tokens + 1, (hash ^ static_cast<std::uint64_t>(token + 1)) * 0x9e3779b97f4a7c15U + 1};
    }
    friend bool operator==(const State&, const State&) = default;
  };
  struct Copy {
    std::string req_id;
    int slot;
    int num_tokens;
  };
  struct Row {
    std::string req_id;
    bool is_new;                       // its running state starts from nothing, or from a hit copy
    std::vector<std::int32_t> prefix;  // then: the tokens of the hit
    int start;                         // computed tokens
    std::vector<std::int32_t> tokens;  // to run; -1: what the row sampled last
    std::vector<std::int32_t> drafts;  // after those
    std::vector<int> blocks;           // all of the request's
    bool samples;
  };
  struct Step {
    std::vector<Copy> hits, snapshots;
    std::vector<Row> rows;
    std::map<std::string, int> epochs;
    std::vector<Copy> unknown_snapshots;  // those among `snapshots` whose tokens the host does not know yet
  };
  // Accepted drafts and one more token, a list a request.
  using Output = std::map<std::string, std::vector<std::int32_t>>;

  FakeDevice(int num_blocks, int block_size, int num_slots)
      : block_size_(block_size),
        kv_(static_cast<std::size_t>(num_blocks * block_size), ~std::uint64_t{0}),
        slots_(static_cast<std::size_t>(num_slots), State{-1, 0}) {}

  // The model: few different tokens, so that prompts made of outputs meet again.
  static std::int32_t sample(const State& state) { return static_cast<std::int32_t>(state.hash >> 61) % 3; }

  Output run(const Step& step) {
    for (const Row& row : step.rows)
      if (row.is_new) running_[row.req_id] = {State{}};
    for (const Copy& hit : step.hits) {
      REQUIRE(slot(hit.slot).num_tokens == hit.num_tokens);
      running_[hit.req_id] = {slot(hit.slot)};
    }
    Output output;
    for (const Row& row : step.rows) {
      auto sampled = forward(row);
      if (row.samples) output[row.req_id] = std::move(sampled);
    }
    std::set<int> written;  // all copies run at once
    for (const Copy& copy : step.snapshots) {
      REQUIRE(written.insert(copy.slot).second);
      for (const State& state : running_[copy.req_id])
        if (state.num_tokens == copy.num_tokens) slot(copy.slot) = state;
    }
    return output;
  }
  // What a snapshot slot holds.
  const State& snapshot(int i) const { return slots_[static_cast<std::size_t>(i)]; }

 private:
  State& slot(int i) { return slots_[static_cast<std::size_t>(i)]; }
  std::uint64_t& kv(const Row& row, int position) {
    const int block = row.blocks.at(static_cast<std::size_t>(position / block_size_));
    if (block == 0) throw std::logic_error("block 0 was handed out");
    return kv_[static_cast<std::size_t>(block * block_size_ + position % block_size_)];
  }

  // Leaves the states after each accepted token of this step in running_, the last one last.
  std::vector<std::int32_t> forward(const Row& row) {
    std::vector<State>& states = running_[row.req_id];
    State state = states.back();
    states.clear();
    REQUIRE(state.num_tokens == row.start);
    // Attention reads all K/V of the prefix.
    std::vector<std::int32_t>& computed = computed_[row.req_id];
    if (row.is_new) computed = row.prefix;
    State replayed;
    bool is_intact = static_cast<int>(computed.size()) == row.start;
    for (const std::int32_t token : computed) {
      replayed = replayed.next(token);
      is_intact = is_intact && kv(row, replayed.num_tokens - 1) == replayed.hash;
    }
    REQUIRE(is_intact);
    REQUIRE(replayed == state);

    for (std::int32_t token : row.tokens) {
      if (token < 0) token = last_sampled_[row.req_id];
      state = state.next(token);
      kv(row, state.num_tokens - 1) = state.hash;
      computed.push_back(token);
      states.push_back(state);
    }
    // K/V of all drafts is written, then those that the model would not have said are rejected.
    State drafted = state;
    for (const std::int32_t draft : row.drafts) {
      drafted = drafted.next(draft);
      kv(row, drafted.num_tokens - 1) = drafted.hash;
    }
    std::vector<std::int32_t> sampled;
    for (const std::int32_t draft : row.drafts) {
      if (draft != sample(state)) break;
      sampled.push_back(draft);
      state = state.next(draft);
      computed.push_back(draft);
      states.push_back(state);
    }
    sampled.push_back(sample(state));
    last_sampled_[row.req_id] = sampled.back();
    return sampled;
  }

  int block_size_;
  std::vector<std::uint64_t> kv_;
  std::vector<State> slots_;
  std::map<std::string, std::vector<State>> running_;
  std::map<std::string, std::vector<std::int32_t>> computed_;  // the tokens behind a request's K/V and state
  std::map<std::string, std::int32_t> last_sampled_;
};

}  // namespace deltaic::test

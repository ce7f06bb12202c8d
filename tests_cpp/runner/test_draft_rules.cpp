#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "cpp/src/core/cuda_runtime.h"
#include "cpp/src/runner/draft_kernels.h"
#include "cpp/src/runner/draft_rules.h"
#include "tests_cpp/support/on_device.h"

using namespace deltaic;
using namespace deltaic::test;

// The rules of steps with drafts on made-up steps: against plain words here, and the kernels against the rules.

namespace {

constexpr int kRows = 37, kSlots = 40, kDrafts = 3, kBlock = 4, kStride = 64, kMaxTokens = 1000, kMaxModelLen = 200;

// Hands out arrays of some memory, always at the same offsets.
class Arena {
 public:
  explicit Arena(std::byte* memory) : next_(memory) { std::memset(memory, 0, kNumBytes); }
  template <class T>
  T* take(std::int64_t count) {
    T* const array = reinterpret_cast<T*>(next_);
    next_ += (static_cast<std::size_t>(count) * sizeof(T) + 15) / 16 * 16;
    return array;
  }
  static constexpr std::size_t kNumBytes = std::size_t{1} << 20;

 private:
  std::byte* next_;
};

// A step of random rows: verified ones, then prefills, and padding among the first. `truth` is what no array says.
struct DraftStep {
  struct Row {
    int slot = -1, begin = 0, num_tokens = 1, num_rejected_unheard = 0, num_output = 0, num_blocks = 0;
    bool is_verified = false, samples = false, is_first = false;
  };
  std::vector<Row> truth;
  cuda::PlaceTokens place;
  cuda::VerifyTokens verify;
  cuda::TakeDraft take;
  std::int32_t *token_ids = nullptr, *sampled_ids = nullptr, *kept_tokens = nullptr;
  std::uint8_t* is_finite = nullptr;
  int num_tokens = 0, num_samples = 0;

  DraftStep(std::byte* memory, unsigned seed) {
    Arena arena(memory);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const auto ints = [&](std::int64_t count) { return arena.take<std::int32_t>(count); };
    const auto longs = [&](std::int64_t count) { return arena.take<std::int64_t>(count); };

    kept_tokens = ints((1 + kDrafts) * kSlots);
    cuda::DraftSlots kept{.tokens = kept_tokens, .num_accepted = ints(kSlots), .num_rejected = ints(kSlots)};
    kept.num_slots = kSlots, kept.max_drafts = kDrafts;
    auto *slots = ints(kRows), *starts = ints(kRows + 1), *first_samples = ints(kRows), *capacities = ints(kRows),
         *table = ints(kRows * kStride), *known_rejected = ints(kRows), *num_accepted = ints(kRows),
         *seq_lens = ints(kRows), *output_positions = ints(kMaxTokens), *next_ids = ints(kRows),
         *snapshot_offsets = ints(kRows);
    auto *positions = longs(kMaxTokens), *slot_mapping = longs(kMaxTokens);
    token_ids = ints(kMaxTokens), sampled_ids = ints(kMaxTokens), is_finite = arena.take<std::uint8_t>(kMaxTokens);

    const int num_verified = 20;
    for (int i = 0; i < kRows; ++i) {
      Row row;
      row.is_verified = i < num_verified;
      if (below(10) != 0 || !row.is_verified) row.slot = (i * 7) % kSlots;
      row.begin = 4 + below(150);
      row.num_tokens = row.slot < 0 ? 1 : row.is_verified ? 1 + below(1 + kDrafts) : 1 + below(40);
      row.samples = row.slot >= 0 && (row.is_verified || below(2) == 0);
      row.is_first = row.slot >= 0 && below(8) == 0;
      row.num_rejected_unheard = row.is_verified && row.slot >= 0 && !row.is_first ? below(4) : 0;
      row.num_output = row.is_verified ? 1 + below(5) : 0;
      row.num_blocks = (row.begin + row.num_tokens + row.num_rejected_unheard) / kBlock + 1 + below(2);
      slots[i] = row.slot;
      starts[i + 1] = starts[i] + row.num_tokens;
      first_samples[i] = row.samples ? num_samples : -1;
      capacities[i] = row.num_blocks * kBlock;
      for (int b = 0; b < row.num_blocks; ++b) table[i * kStride + b] = 1 + below(5000);
      num_accepted[i] = row.slot < 0 ? 1 : !row.is_verified ? 0 : below(2) == 0 ? -1 : 1 + below(4);
      next_ids[i] = row.slot < 0 || row.samples ? -1 : below(3) == 0 ? -1 : 500 + i;
      if (row.slot >= 0) {
        kept.num_rejected[row.slot] = 10 + below(50);
        kept.num_accepted[row.slot] = 1 + below(4);
        known_rejected[i] = row.is_first ? -1 : kept.num_rejected[row.slot] - row.num_rejected_unheard;
      }
      snapshot_offsets[i] = 2 - row.num_rejected_unheard;
      seq_lens[i] = row.slot < 0 ? 1 : row.begin + row.num_rejected_unheard + row.num_tokens;
      for (int j = 0; j < row.num_tokens; ++j) {
        positions[starts[i] + j] = row.slot < 0 ? 0 : row.begin + row.num_rejected_unheard + j;
        slot_mapping[starts[i] + j] = -1;
        token_ids[starts[i] + j] = j > 0 && row.is_verified && below(6) == 0 ? -1 : 1 + below(2);
      }
      const int num_sampled = !row.samples ? row.slot < 0 ? 1 : 0 : row.is_verified ? row.num_tokens : 1;
      for (int j = 0; j < num_sampled; ++j, ++num_samples) {
        output_positions[num_samples] = row.num_output + row.num_rejected_unheard + j;
        sampled_ids[num_samples] = 1 + below(2);
        is_finite[num_samples] = below(25) != 0;
      }
      num_tokens += row.num_tokens;
      truth.push_back(row);
    }
    const cuda::DraftRows rows{.num_rows = kRows,
                               .num_verified = num_verified,
                               .slots = slots,
                               .query_start_loc = starts,
                               .first_samples = first_samples,
                               .capacities = capacities,
                               .block_table = table,
                               .row_stride = kStride,
                               .block_size = kBlock,
                               .max_model_len = kMaxModelLen};
    place = {.kept = kept,
             .rows = rows,
             .num_rejected = known_rejected,
             .token_ids = token_ids,
             .positions = positions,
             .slot_mapping = slot_mapping,
             .seq_lens = seq_lens,
             .num_accepted = num_accepted,
             .snapshot_offsets = snapshot_offsets,
             .output_positions = output_positions,
             .context_ids = ints(kMaxTokens * kDrafts)};
    const cuda::VerifiedRows result{.token_ids = ints(kRows * (1 + kDrafts)),
                                    .counts = ints(kRows),
                                    .is_finite = ints(kRows),
                                    .drafts = ints(kRows * kDrafts)};
    const cuda::DraftPass pass{.slots = ints(kRows),
                               .input_ids = ints(kRows),
                               .hidden_rows = ints(kRows),
                               .begin_positions = longs(kRows),
                               .positions = longs(kRows),
                               .slot_mapping = longs(kRows),
                               .seq_lens = ints(kRows),
                               .output_positions = ints(kRows),
                               .num_context = ints(kRows),
                               .context_ids = ints(kRows * kDrafts)};
    verify = {.kept = kept,
              .rows = rows,
              .sampled_ids = sampled_ids,
              .is_finite = is_finite,
              .token_ids = token_ids,
              .positions = positions,
              .output_positions = output_positions,
              .next_ids = next_ids,
              .acceptance = -1.0F,
              .makes_drafts = true,
              .result = result,
              .shifted_ids = ints(kMaxTokens),
              .pass = pass};
    take = {.kept = kept,
            .rows = rows,
            .sampled_ids = sampled_ids,
            .is_finite = is_finite,
            .number = 0,
            .is_last = false,
            .result = result,
            .pass = pass};
  }

  int start(int row) const { return place.rows.query_start_loc[row]; }
  void run_place() const {
    for (int row = 0; row < kRows; ++row) {
      if (place.rows.slots[row] < 0) continue;
      const int shift = cuda::shift_of(place, row);
      for (int j = 0; row < place.rows.num_verified && j < cuda::num_tokens_of(place.rows, row); ++j)
        cuda::place_token(place, row, j, shift);
      cuda::place_row(place, row, shift);
    }
  }
  void run_verify() const {
    for (int row = 0; row < kRows; ++row) {
      const cuda::VerifiedRow verified = cuda::verify_row(verify, row);
      for (int j = 0; j < cuda::num_tokens_of(verify.rows, row); ++j)
        verify.shifted_ids[start(row) + j] = cuda::shifted_id(verify, row, j, verified);
    }
  }
  void run_take(int number) {
    take.number = number, take.is_last = number + 1 == kDrafts;
    for (int row = 0; row < kRows; ++row) cuda::take_draft_of_row(take, row);
  }
};

std::vector<std::byte> host_memory() { return std::vector<std::byte>(Arena::kNumBytes + 16); }
std::byte* aligned(std::vector<std::byte>& memory) {
  return memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
}

}  // namespace

TEST_CASE("a row begins as many tokens earlier as drafts were rejected that the host has not heard of") {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::vector<std::byte> memory = host_memory(), before_memory = host_memory();
    const DraftStep step(aligned(memory), seed), before(aligned(before_memory), seed);
    step.run_place();
    for (int i = 0; i < kRows; ++i) {
      const DraftStep::Row& row = step.truth[static_cast<std::size_t>(i)];
      if (row.slot < 0) continue;
      CHECK(step.place.kept.num_rejected[row.slot] == (row.is_first ? 0 : before.place.kept.num_rejected[row.slot]));
      CHECK(step.place.seq_lens[i] == row.begin + row.num_tokens);
      CHECK(step.place.snapshot_offsets[i] == 2);
      const int accepted = before.place.num_accepted[i];
      CHECK(step.place.num_accepted[i] == (accepted < 0 ? before.place.kept.num_accepted[row.slot] : accepted));
      for (int j = 0; j < row.num_tokens; ++j) {
        const int token = step.start(i) + j, position = row.begin + j;
        CHECK(step.place.positions[token] == position);
        if (!row.is_verified) continue;
        const std::int64_t block = step.place.rows.block_table[i * kStride + position / kBlock];
        CHECK(step.place.slot_mapping[token] == block * kBlock + position % kBlock);
        const int sample = step.place.rows.first_samples[i] + j;
        CHECK(step.place.output_positions[sample] == row.num_output + j);
        for (int k = 0; k < j; ++k)
          CHECK(step.place.context_ids[sample * kDrafts + k] == step.token_ids[step.start(i) + 1 + k]);
      }
    }
  }
}

TEST_CASE("drafts are accepted while they are what was sampled, and all counts follow; D55: a placeholder never is") {
  std::vector<int> seen(kDrafts + 2, 0);
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::vector<std::byte> memory = host_memory(), before_memory = host_memory();
    const DraftStep step(aligned(memory), seed), before(aligned(before_memory), seed);
    step.run_place(), before.run_place();
    step.run_verify();
    for (int i = 0; i < kRows; ++i) {
      const DraftStep::Row& row = step.truth[static_cast<std::size_t>(i)];
      const int first = step.place.rows.first_samples[i];
      const cuda::VerifiedRows& result = step.verify.result;
      for (int j = 0; j < kDrafts; ++j) CHECK(result.drafts[i * kDrafts + j] == -1);
      if (!row.samples) {
        CHECK(result.counts[i] == 0);
        CHECK(step.verify.pass.slots[i] == -1);
        continue;
      }
      const int num_drafts = row.is_verified ? row.num_tokens - 1 : 0;
      std::vector<std::int32_t> tokens;
      bool is_finite = true;
      for (int j = 0; j <= num_drafts && is_finite; ++j) {
        is_finite = step.is_finite[first + j] != 0;
        tokens.push_back(step.sampled_ids[first + j]);
        if (j < num_drafts && step.token_ids[step.start(i) + 1 + j] != tokens.back()) break;
      }
      if (!is_finite) tokens = {0};
      CHECK(result.is_finite[i] == is_finite);
      REQUIRE(result.counts[i] == static_cast<int>(tokens.size()));
      CHECK(std::equal(tokens.begin(), tokens.end(), result.token_ids + i * (1 + kDrafts)));
      CHECK(step.verify.kept.num_accepted[row.slot] == result.counts[i]);
      CHECK(step.verify.kept.num_rejected[row.slot] ==
            before.verify.kept.num_rejected[row.slot] + num_drafts + 1 - result.counts[i]);
      CHECK(step.kept_tokens[row.slot] == tokens.back());
      const int last = row.is_verified ? result.counts[i] - 1 : row.num_tokens - 1;
      CHECK(step.verify.pass.hidden_rows[i] == step.start(i) + last);
      CHECK(step.verify.pass.begin_positions[i] == row.begin + last);
      CHECK(step.verify.pass.output_positions[i] == row.num_output + result.counts[i]);
      CHECK((step.verify.pass.slots[i] == row.slot) == (is_finite && row.begin + last + 2 < kMaxModelLen));
      ++seen[is_finite ? tokens.size() : 0];
    }
  }
  for (const int count : seen) CHECK(count > 20);
}

TEST_CASE("D50: the draft module reads the token behind each one, of a prompt's part the next known, and never -1") {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::vector<std::byte> memory = host_memory();
    const DraftStep step(aligned(memory), seed);
    step.run_place(), step.run_verify();
    for (int i = 0; i < kRows; ++i) {
      const DraftStep::Row& row = step.truth[static_cast<std::size_t>(i)];
      const int count = step.verify.result.counts[i];
      const int last = row.is_verified && count > 0 ? count - 1 : row.num_tokens - 1;
      for (int j = 0; j < row.num_tokens; ++j) {
        const std::int32_t id = step.verify.shifted_ids[step.start(i) + j];
        REQUIRE(id >= 0);
        if (row.slot >= 0 && j < last) CHECK(id == step.token_ids[step.start(i) + j + 1]);
        if (row.slot < 0 || j != last) continue;
        const std::int32_t known = std::max(step.verify.next_ids[i], 0);
        CHECK(id == (row.samples ? step.verify.result.token_ids[i * (1 + kDrafts) + count - 1] : known));
      }
    }
  }
}

TEST_CASE("a chain goes on while the row's blocks and max_model_len have room") {
  int num_stopped = 0;
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::vector<std::byte> memory = host_memory();
    DraftStep step(aligned(memory), seed);
    step.run_place(), step.run_verify();
    std::vector<std::int32_t> drafting(step.verify.pass.slots, step.verify.pass.slots + kRows);
    std::fill_n(step.is_finite, kRows, 1);
    for (int number = 0; number < kDrafts; ++number) {
      for (int i = 0; i < kRows; ++i) step.sampled_ids[i] = 1000 * number + i;
      step.run_take(number);
      for (int i = 0; i < kRows; ++i) {
        const cuda::DraftPass& pass = step.take.pass;
        const auto index = static_cast<std::size_t>(i);
        CHECK(step.take.result.drafts[i * kDrafts + number] == (drafting[index] >= 0 ? 1000 * number + i : -1));
        if (drafting[index] >= 0) {
          CHECK(step.kept_tokens[(1 + number) * kSlots + drafting[index]] == 1000 * number + i);
          CHECK(pass.num_context[i] == number + 1);
        }
        const std::int64_t position = pass.begin_positions[i] + number + 1;
        const bool has_room = position < step.truth[index].num_blocks * kBlock && position + 2 < kMaxModelLen;
        if (drafting[index] >= 0 && !has_room) ++num_stopped;
        if (!has_room || number + 1 == kDrafts) drafting[index] = -1;
        CHECK(pass.slots[i] == drafting[index]);
        CHECK(pass.seq_lens[i] == (drafting[index] >= 0 ? position + 1 : 1));
        CHECK((pass.slot_mapping[i] >= 0) == (drafting[index] >= 0));
        CHECK(pass.input_ids[i] == (drafting[index] >= 0 ? 1000 * number + i : 0));
      }
    }
  }
  CHECK(num_stopped > 20);
}

TEST_CASE("a script accepts its share of the drafts, whatever they are") {
  int num_accepted = 0, num_drafts = 0;
  for (int slot = 0; slot < 10; ++slot)
    for (int position = 0; position < 2000; ++position, ++num_drafts)
      num_accepted += cuda::is_accepted_by_script(0.8F, slot, position) ? 1 : 0;
  CHECK(num_accepted > 0.79 * num_drafts);
  CHECK(num_accepted < 0.81 * num_drafts);
  CHECK(cuda::is_accepted_by_script(1.0F, 3, 5));
  CHECK_FALSE(cuda::is_accepted_by_script(0.0F, 3, 5));
}

TEST_CASE("the kernels do what the rules say [sanitizer]") {
  if (!has_gpu()) return;
  const cuda::Stream stream;
  const ops::Stream handle{stream.handle()};
  const cuda::PinnedBuffer pinned(Arena::kNumBytes);
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::vector<std::byte> memory = host_memory();
    DraftStep expected(aligned(memory), seed), actual(pinned.data(), seed);
    const auto check = [&](const char* what) {
      stream.wait();
      CAPTURE(seed);
      REQUIRE_MESSAGE(std::memcmp(aligned(memory), pinned.data(), Arena::kNumBytes) == 0, what);
    };
    check("before");
    expected.run_place();
    cuda::place_tokens(handle, actual.place);
    check("place_tokens");
    if (seed % 4 == 3) expected.verify.acceptance = actual.verify.acceptance = 0.5F;
    expected.run_verify();
    cuda::verify_tokens(handle, actual.verify);
    check("verify_tokens");
    for (int number = 0; number < kDrafts; ++number) {
      expected.run_take(number);
      actual.take.number = number, actual.take.is_last = number + 1 == kDrafts;
      cuda::take_draft(handle, actual.take);
      check("take_draft");
    }
  }
  const cuda::PinnedBuffer copy(4000);
  cuda::copy_words(handle, pinned.data(), copy.data(), 999);
  stream.wait();
  CHECK(std::memcmp(copy.data(), pinned.data(), 999 * 4) == 0);
}

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cpp/src/runner/input_batch.h"

namespace deltaic {

// What a row does in a step, in the order of the batch. Rows that do not run come last.
enum class RowRegion : std::uint8_t { decode, short_extend, long_extend, prefill, idle };
inline constexpr int kNumRegions = 5;

// decode        past its prompt or with drafts, reaches its newest token, and scheduled = 1 + drafts
// prefill       nothing computed yet
// long_extend   more than one token behind a context
// short_extend  one token behind a context, inside what was known at admission
RowRegion region_of(const BatchRow& row);

// Arranges rows by ascending region with the fewest swaps: a row that lies inside its region's span does not move, and
// what is out of place is exchanged in the shortest cycles, lowest rows first.
class BatchReorder {
 public:
  // The swaps, in order. Valid until the next call.
  std::span<const std::pair<int, int>> plan(std::span<const RowRegion> regions);
  // Reorders the rows of a batch and returns the number of rows of each region.
  std::array<int, kNumRegions> apply(InputBatch& batch);

 private:
  // Positions in the span of one region that hold a row of another, lowest first.
  struct Misplaced {
    std::vector<int> positions;
    std::size_t next = 0;
    bool empty() const { return next == positions.size(); }
    int pop() { return positions[next++]; }
  };
  Misplaced& misplaced(int span, int region) {
    return misplaced_[static_cast<std::size_t>(span * kNumRegions + region)];
  }
  void swap_pairs();
  void swap_triples();
  void swap_longer_cycles();

  std::array<Misplaced, kNumRegions * kNumRegions> misplaced_;
  std::vector<std::pair<int, int>> swaps_;
  std::vector<RowRegion> regions_;
};

}  // namespace deltaic

#include "cpp/src/runner/batch_reorder.h"

#include <cstddef>

namespace deltaic {

RowRegion region_of(const BatchRow& row) {
  if (row.num_scheduled_tokens == 0) return RowRegion::idle;
  if (row.num_computed_tokens == 0) return RowRegion::prefill;
  const bool is_past_prompt = row.num_computed_tokens >= row.num_prompt_tokens || row.num_draft_tokens > 0;
  const bool is_one_token = row.num_scheduled_tokens == 1 + row.num_draft_tokens;
  if (is_past_prompt && is_one_token && !row.is_partial_prefill()) return RowRegion::decode;
  return row.num_scheduled_tokens > 1 ? RowRegion::long_extend : RowRegion::short_extend;
}

std::span<const std::pair<int, int>> BatchReorder::plan(std::span<const RowRegion> regions) {
  swaps_.clear();
  std::array<int, kNumRegions> counts{};
  for (const RowRegion region : regions) ++counts[static_cast<std::size_t>(region)];
  for (Misplaced& list : misplaced_) list.positions.clear(), list.next = 0;
  int position = 0;
  for (int span = 0; span < kNumRegions; ++span)
    for (int i = 0; i < counts[static_cast<std::size_t>(span)]; ++i, ++position) {
      const int region = static_cast<int>(regions[static_cast<std::size_t>(position)]);
      if (region != span) misplaced(span, region).positions.push_back(position);
    }
  // A cycle of n rows takes n - 1 swaps, so many short cycles are best.
  swap_pairs();
  swap_triples();
  swap_longer_cycles();
  return swaps_;
}

void BatchReorder::swap_pairs() {
  for (int a = 0; a < kNumRegions; ++a)
    for (int b = a + 1; b < kNumRegions; ++b) {
      Misplaced& in_a = misplaced(a, b);
      Misplaced& in_b = misplaced(b, a);
      while (!in_a.empty() && !in_b.empty()) {
        const int first = in_a.pop();
        swaps_.emplace_back(first, in_b.pop());
      }
    }
}

void BatchReorder::swap_triples() {
  for (int a = 0; a < kNumRegions; ++a)
    for (int b = a + 1; b < kNumRegions; ++b)
      for (int c = a + 1; c < kNumRegions; ++c) {
        if (c == b) continue;
        Misplaced& in_a = misplaced(a, b);
        Misplaced& in_b = misplaced(b, c);
        Misplaced& in_c = misplaced(c, a);
        while (!in_a.empty() && !in_b.empty() && !in_c.empty()) {
          const int first = in_a.pop();
          swaps_.emplace_back(first, in_b.pop());
          swaps_.emplace_back(first, in_c.pop());
        }
      }
}

void BatchReorder::swap_longer_cycles() {
  for (int a = 0; a < kNumRegions; ++a)
    for (int b = 0; b < kNumRegions; ++b)
      while (!misplaced(a, b).empty()) {
        const int first = misplaced(a, b).pop();
        // Follow the row that now lies at `first` until it is one of region a: as many rows enter a span as leave it.
        for (int region = b; region != a;) {
          int next = 0;
          while (misplaced(region, next).empty()) ++next;
          swaps_.emplace_back(first, misplaced(region, next).pop());
          region = next;
        }
      }
}

std::array<int, kNumRegions> BatchReorder::apply(InputBatch& batch) {
  std::array<int, kNumRegions> counts{};
  regions_.clear();
  for (int i = 0; i < batch.num_reqs(); ++i) {
    regions_.push_back(region_of(batch.row(i)));
    ++counts[static_cast<std::size_t>(regions_.back())];
  }
  for (const auto& [a, b] : plan(regions_)) batch.swap(a, b);
  return counts;
}

}  // namespace deltaic

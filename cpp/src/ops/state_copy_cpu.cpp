// All rows are decided first, then every state of every copying row is one item of work.
#include <cstring>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/state_copy_rules.h"

namespace deltaic::cpu {

namespace {

#ifdef NDEBUG
constexpr bool kDebugChecks = false;
#else
constexpr bool kDebugChecks = true;
#endif

void move_bytes(const ops::StateMove& move) {
  if (move.num_rows == 0) {
    std::memmove(move.dst, move.src, static_cast<std::size_t>(move.size));
    return;
  }
  for (std::int64_t row = 0; row < move.num_rows; ++row)
    std::memmove(move.dst + row * move.row_stride, move.src + row * move.row_stride,
                 static_cast<std::size_t>(move.size));
}

}  // namespace

void copy_states(ThreadPool& threads, const ops::StateCopyPlan& plan, const ops::StateCopyArgs& args) {
  std::vector<ops::RequestCopy> copies;
  for (std::int32_t row = 0; row < args.num_reqs; ++row) {
    const ops::Decision decision = ops::decide(args, row);
    if (decision.slot < 0) continue;
    if (kDebugChecks)
      DELTAIC_CHECK(decision.in_range, "row ", row, " has ", args.num_accepted[decision.slot],
                    " accepted tokens and running column ", args.state_idx[decision.slot], ": its block table has ",
                    args.num_columns, " columns");
    args.num_accepted_out[decision.slot] = decision.num_accepted;
    if (args.state_idx_out != nullptr) args.state_idx_out[decision.slot] = decision.state_idx;
    if (decision.has_copy) copies.push_back(decision.copy);
  }
  const auto num_states = static_cast<std::int64_t>(plan.states().size());
  threads.parallel_for(
      static_cast<std::int64_t>(copies.size()) * num_states, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t item = begin; item < end; ++item) {
          const ops::StateTensor& state = plan.states()[static_cast<std::size_t>(item % num_states)];
          const ops::BlockTable& table = plan.block_tables()[static_cast<std::size_t>(state.group)];
          const ops::StateMove move = ops::locate(state, table, copies[static_cast<std::size_t>(item / num_states)]);
          if (move.size > 0) move_bytes(move);
        }
      });
}

}  // namespace deltaic::cpu

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <deltaic/runner.h>

#include "cpp/src/ops/context.h"

namespace deltaic {

// Moves the recurrent state of all GDN layers between slots. The work list is gathered first and then done in one
// batch_memcpy; a step without copies costs nothing.
class StateCopier {
 public:
  explicit StateCopier(std::span<const ModelRunner::LayerStateCache> caches);

  // Adds the copy of both states of every layer from one slot to another.
  void add(int from_slot, int to_slot);
  // Does what was added, on the CPU of ctx, and forgets it.
  void run(const ops::Context& ctx);

  // The same as a work list: the addresses and sizes of one copy are num_states() entries behind the three pointers.
  int num_states() const { return static_cast<int>(rows_.size()); }
  void write(int from_slot, int to_slot, std::int64_t* sources, std::int64_t* destinations, std::int64_t* sizes) const;

 private:
  struct Rows {
    std::int64_t base = 0;  // address of slot 0
    std::int64_t stride_bytes = 0;
    std::int64_t row_bytes = 0;
  };
  std::vector<Rows> rows_;  // conv and temporal of every layer
  std::vector<std::int64_t> sources_, destinations_, sizes_;
};

}  // namespace deltaic

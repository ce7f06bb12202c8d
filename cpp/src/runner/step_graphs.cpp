#include "cpp/src/runner/step_graphs.h"

#include <algorithm>

namespace deltaic {

int padded_num_rows(int num_rows, int max_num_rows) {
  const int step = num_rows <= 16 ? 1 : num_rows <= 32 ? 4 : num_rows <= 64 ? 8 : num_rows <= 256 ? 16 : 32;
  return std::min((num_rows + step - 1) / step * step, max_num_rows);
}

void StepGraphs::record(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue) {
  enqueue();
  graphs_.emplace(key, cuda::Graph(stream, enqueue));
}

void StepGraphs::run(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue) const {
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) return enqueue();
  found->second.launch(stream);
}

}  // namespace deltaic

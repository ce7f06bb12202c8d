#include "cpp/src/runner/step_graphs.h"

#include <algorithm>

namespace deltaic {

int padded_num_rows(int num_rows, int max_num_rows) {
  int step = 1;
  if (num_rows > 16)
    for (step = 4; step * 8 < num_rows; step *= 2) {
    }
  return std::min((num_rows + step - 1) / step * step, max_num_rows);
}

int padded_seq_len(int seq_len, int max_model_len) {
  std::int64_t length = 1024;
  while (length < seq_len) length *= 4;
  return static_cast<int>(std::min<std::int64_t>(length, max_model_len));
}

void StepGraphs::run(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue) {
  const auto found = graphs_.find(key);
  if (found != graphs_.end()) return found->second.launch(stream);
  enqueue();
  graphs_.emplace(key, cuda::Graph(stream, enqueue));
}

}  // namespace deltaic

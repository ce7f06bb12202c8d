#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>

#include "cpp/src/core/cuda_runtime.h"

namespace deltaic {

// The rows that a decode step of num_rows runs, padding included: exact up to 16, then multiples of 4 to 32, of 8 to
// 64, of 16 to 256 and of 32 beyond, at most max_num_rows.
int padded_num_rows(int num_rows, int max_num_rows);

// The graphs of a runner's decode steps. What runs for the first time runs without one, which also brings libraries and
// modules to the device, and is recorded then; the runner sees to it that this is before the first request.
class StepGraphs {
 public:
  enum class Part : std::uint8_t { forward, argmax, sample };
  struct Key {
    Part part = Part::forward;
    int num_rows = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  // Launches the graph of `key`, or enqueues and records it. `enqueue` must enqueue the same for the same key.
  void run(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue);

 private:
  std::map<Key, cuda::Graph> graphs_;
};

}  // namespace deltaic

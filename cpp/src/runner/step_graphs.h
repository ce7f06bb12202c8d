#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>

#include "cpp/src/core/cuda_runtime.h"

namespace deltaic {

// The rows that a decode step of num_rows runs, padding included: exact up to 16, then multiples of an eighth to a
// quarter of the size, at most max_num_rows.
int padded_num_rows(int num_rows, int max_num_rows);

// The longest sequence that the graph of a step is made for, at most max_model_len: kernels that were recorded for a
// much longer one than there is would start blocks without work.
int padded_seq_len(int seq_len, int max_model_len);

// The graphs of a runner's decode steps, recorded as they are needed: the first step of a kind runs without one, which
// also brings libraries and modules to the device, and is recorded while the device works on it.
class StepGraphs {
 public:
  enum class Part : std::uint8_t { forward, argmax, sample };
  struct Key {
    Part part = Part::forward;
    int num_rows = 0;
    int max_seq_len = 0;  // 0 where it does not matter
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  // Launches the graph of `key`, or enqueues and records it. `enqueue` must enqueue the same for the same key.
  void run(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue);
  std::size_t size() const { return graphs_.size(); }

 private:
  std::map<Key, cuda::Graph> graphs_;
};

}  // namespace deltaic

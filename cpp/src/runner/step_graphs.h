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

// The graphs of a runner's decode steps, recorded before its first request.
class StepGraphs {
 public:
  enum class Part : std::uint8_t { forward, argmax, sample };
  struct Key {
    Part part = Part::forward;
    int num_rows = 0;
    int query_len = 1;   // tokens a row: its newest, and drafts
    int num_drafts = 0;  // that are made behind it, for argmax and sample
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  // Enqueues, which also brings libraries and modules to the device, and then records what `enqueue` enqueues.
  void record(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue);
  // Launches the graph of `key`, or enqueues where there is none. `enqueue` must be what was recorded.
  void run(const cuda::Stream& stream, const Key& key, const std::function<void()>& enqueue) const;

 private:
  std::map<Key, cuda::Graph> graphs_;
};

}  // namespace deltaic

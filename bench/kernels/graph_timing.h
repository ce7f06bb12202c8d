#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "cuda/check.h"

namespace deltaic {

struct GraphTiming {
  double median_us = 0, best_us = 0;
};

// The device time of one of num_launches calls launch(0), launch(1), ... in a graph, from replays of it.
template <class Launch>
GraphTiming time_in_graph(cudaStream_t stream, int num_launches, const Launch& launch) {
  constexpr int kReplays = 15;
  constexpr std::chrono::milliseconds kWarmUp{50};  // a while, not a count: clocks take milliseconds to rise
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < num_launches; ++i) launch(i);
  cuda::check(cudaStreamEndCapture(stream, &graph));
  cuda::check(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  cuda::check(cudaEventCreate(&begin));
  cuda::check(cudaEventCreate(&end));
  const auto started = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - started < kWarmUp) {
    cuda::check(cudaGraphLaunch(exec, stream));
    cuda::check(cudaStreamSynchronize(stream));
  }
  std::vector<double> times;
  for (int replay = 0; replay < kReplays; ++replay) {
    cuda::check(cudaEventRecord(begin, stream));
    cuda::check(cudaGraphLaunch(exec, stream));
    cuda::check(cudaEventRecord(end, stream));
    cuda::check(cudaEventSynchronize(end));
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1000.0 / num_launches);
  }
  cuda::check(cudaEventDestroy(begin));
  cuda::check(cudaEventDestroy(end));
  cuda::check(cudaGraphExecDestroy(exec));
  cuda::check(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

}  // namespace deltaic

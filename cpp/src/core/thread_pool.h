#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace deltaic {

// The CPU backend's workers. An engine owns one; parallel_for is called from one thread at a time.
class ThreadPool {
 public:
  // num_threads: with the caller; 0: all that this process may use (affinity and cgroup limits respected).
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls body(begin, end) over disjoint ranges that cover [0, count), `grain` items or more each where count allows,
  // handed out dynamically; returns when all are done. What the body computes for an item must not depend on the
  // range it comes in. The first exception of a body is rethrown here; ranges not yet begun are then skipped. Not to be
  // called from a body.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

  // Scratch memory for the op that runs: at least num_bytes, 64-byte aligned, its content undefined. Valid until the
  // next call; the pool keeps the largest that was asked for. Throws OutOfMemory.
  void* workspace(std::size_t num_bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Processors that this process may use, at least 1: its affinity mask, cut by the CPU quota of its cgroups.
int available_processors();

}  // namespace deltaic

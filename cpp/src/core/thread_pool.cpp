#include "cpp/src/core/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"

namespace deltaic {
namespace {

// Chunks a thread gets of a large loop: enough to even out threads that are held up.
constexpr std::int64_t kChunksPerThread = 8;
// How often a worker looks for the next loop before it sleeps; the gaps between the ops of a step are shorter.
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Processors granted by a cgroup folder's quota; a large number when it sets none.
double quota_of(const std::string& folder) {
  constexpr double kNoLimit = 1e9;
  std::string quota;
  double period = 0.0;
  if (std::ifstream v2(folder + "/cpu.max"); v2 >> quota >> period) {
    if (quota == "max" || period <= 0.0) return kNoLimit;
    return std::stod(quota) / period;
  }
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  double micros = 0.0;
  if (quota_file >> micros && period_file >> period && micros > 0.0 && period > 0.0) return micros / period;
  return kNoLimit;
}

// The smallest quota of the process's cgroups and their parents (a container sees its own as the root).
double cgroup_quota() {
  double limit = std::min({quota_of("/sys/fs/cgroup"), quota_of("/sys/fs/cgroup/cpu")});
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const bool is_v2 = second == first + 1;
    std::string path = line.substr(second + 1);
    for (; path.size() > 1; path.resize(path.rfind('/')))
      limit = std::min(limit, quota_of((is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu") + path));
  }
  return limit;
}

}  // namespace

int available_processors() {
  int count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) count = CPU_COUNT(&allowed);
#endif
  const double quota = cgroup_quota();
  if (quota < count) count = static_cast<int>(quota + 0.999);
  return std::max(1, count);
}

// A loop is open from the moment its fields are set until all its items are handed out. A worker counts itself in
// (`inside`) before it looks whether a loop is open, and the caller waits for `inside` to be 0 after it has closed the
// loop: a worker that comes late finds it closed and touches nothing, so nobody waits for a thread that sleeps.
struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  Buffer scratch;

  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
  std::int64_t count = 0, chunk = 1;
  std::mutex error_mutex;
  std::exception_ptr error;

  alignas(64) std::atomic<std::int64_t> next{0};
  alignas(64) std::atomic<bool> is_open{false};
  alignas(64) std::atomic<int> inside{0};
  alignas(64) std::atomic<std::uint32_t> loops{0};  // counts the loops; sleepers wait for it to change
  std::atomic<int> sleepers{0};
  std::atomic<bool> stopping{false};
  std::atomic<bool> is_busy{false};

  void work() {
    while (true) {
      const std::int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      try {
        (*body)(begin, std::min(begin + chunk, count));
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  }

  void worker_loop() {
    std::uint32_t seen = 0;
    while (!stopping.load(std::memory_order_acquire)) {
      const std::uint32_t now = wait_for_loop(seen);
      if (now == seen) continue;
      seen = now;
      inside.fetch_add(1);
      if (is_open.load()) work();
      inside.fetch_sub(1);
    }
  }

  void stop() {
    stopping.store(true);
    loops.fetch_add(1);
    loops.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  // The number of the newest loop, `seen` when woken without one.
  std::uint32_t wait_for_loop(std::uint32_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const std::uint32_t now = loops.load(std::memory_order_acquire);
      if (now != seen) return now;
      pause();
    }
    sleepers.fetch_add(1);
    if (!stopping.load()) loops.wait(seen);
    sleepers.fetch_sub(1);
    return loops.load(std::memory_order_acquire);
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  DELTAIC_CHECK(num_threads >= 0, "num_threads is ", num_threads, ", it must be 0 (all processors) or more");
  if (num_threads == 0) num_threads = available_processors();
  try {
    impl_->workers.reserve(static_cast<std::size_t>(num_threads) - 1);
    for (int i = 1; i < num_threads; ++i) impl_->workers.emplace_back([impl = impl_.get()] { impl->worker_loop(); });
  } catch (const std::exception& error) {
    const int num_started = this->num_threads();
    impl_->stop();
    throw OutOfMemory(detail::concat("num_threads is ", num_threads, ", and the system starts no more than ",
                                     num_started, ": ", error.what()));
  }
}

ThreadPool::~ThreadPool() { impl_->stop(); }

int ThreadPool::num_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(std::int64_t count, std::int64_t grain,
                              const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (impl_->workers.empty() || count <= grain) return body(0, count);
  Impl& pool = *impl_;
  DELTAIC_CHECK(!pool.is_busy.exchange(true), "parallel_for is called while another loop of the same pool runs");
  pool.body = &body;
  pool.count = count;
  pool.chunk = std::max(grain, count / (kChunksPerThread * num_threads()));
  pool.next.store(0);
  pool.is_open.store(true);
  pool.loops.fetch_add(1);
  if (pool.sleepers.load() > 0) pool.loops.notify_all();
  pool.work();
  pool.is_open.store(false);
  for (int spin = 0; pool.inside.load() != 0; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();  // a worker that the system holds up may need this processor
    }
  }
  const std::exception_ptr error = std::exchange(pool.error, nullptr);
  pool.is_busy.store(false);
  if (error) std::rethrow_exception(error);
}

void* ThreadPool::workspace(std::size_t num_bytes) {
  if (num_bytes > impl_->scratch.num_bytes()) {
    impl_->scratch = Buffer();
    impl_->scratch = Buffer(num_bytes, Device{});
  }
  return impl_->scratch.data();
}

}  // namespace deltaic

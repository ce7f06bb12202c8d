#include <doctest/doctest.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <deltaic/error.h>

#include "cpp/src/core/thread_pool.h"

namespace deltaic {
namespace {

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space of their own
TEST_CASE("threads that the system does not start are an error with the numbers") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  REQUIRE(pages > 0);
  const rlimit tight{pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (128U << 20), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_AS, &tight) == 0);
  std::string message;
  try {
    const ThreadPool pool(2000);
  } catch (const OutOfMemory& error) {
    message = error.what();
  }
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(message.starts_with("num_threads is 2000, and the system starts no more than "));
}
#endif

TEST_CASE("parallel_for runs every item once") {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (const std::int64_t count : {0, 1, 2, 7, 100, 10007})
      for (const std::int64_t grain : {1, 3, 64}) {
        CAPTURE(num_threads);
        CAPTURE(count);
        CAPTURE(grain);
        std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
        std::atomic<int> small_ranges{0};
        pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
          if (end - begin < grain && end != count) ++small_ranges;
          for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        int wrong = 0;
        for (const auto& hit : hits) wrong += hit != 1;
        CHECK(wrong == 0);
        CHECK(small_ranges == 0);
      }
  }
}

TEST_CASE("many short loops, with pauses long enough for the workers to sleep") {
  ThreadPool pool(3);
  std::atomic<std::int64_t> sum{0};
  for (int loop = 0; loop < 3000; ++loop) {
    if (loop % 300 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    pool.parallel_for(16, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) sum += i;
    });
  }
  CHECK(sum == 3000 * 120);
}

TEST_CASE("the first exception of a body reaches the caller and the pool lives on") {
  ThreadPool pool(4);
  for (int i = 0; i < 20; ++i)
    CHECK_THROWS_WITH_AS(pool.parallel_for(100, 1,
                                           [](std::int64_t begin, std::int64_t) {
                                             if (begin >= 0) throw std::runtime_error("bad item");
                                           }),
                         "bad item", std::runtime_error);
  std::atomic<int> items{0};
  pool.parallel_for(50, 1, [&](std::int64_t begin, std::int64_t end) { items += static_cast<int>(end - begin); });
  CHECK(items == 50);
}

TEST_CASE("a loop inside a loop of the same pool is refused") {
  ThreadPool pool(2);
  CHECK_THROWS_AS(
      pool.parallel_for(
          8, 1, [&](std::int64_t, std::int64_t) { pool.parallel_for(8, 1, [](std::int64_t, std::int64_t) {}); }),
      InvalidArgument);
}

TEST_CASE("the affinity mask limits the number of threads") {
  cpu_set_t before, one;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  const int available = available_processors(), threads = ThreadPool(0).num_threads();
  REQUIRE(sched_setaffinity(0, sizeof(before), &before) == 0);
  CHECK(available == 1);
  CHECK(threads == 1);
  CHECK(available_processors() <= CPU_COUNT(&before));
}

TEST_CASE("the workspace grows and is aligned") {
  ThreadPool pool(1);
  void* small = pool.workspace(100);
  CHECK(pool.workspace(50) == small);
  CHECK(reinterpret_cast<std::uintptr_t>(pool.workspace(100000)) % 64 == 0);
  CHECK_THROWS_AS(ThreadPool(-1), InvalidArgument);
}

}  // namespace
}  // namespace deltaic

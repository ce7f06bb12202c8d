#include "cpp/src/ops/ceilings.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/ops/kernels/isa.h"

namespace deltaic::cpu {

Clock::Clock(const ThreadPool& threads) : id_(threads.num_threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC) {}

double Clock::seconds() const {
  timespec now{};
  clock_gettime(id_, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

namespace {

// Twelve independent chains of vectors; returns flops.
#define DELTAIC_FMA_LOOP(name, bytes, ...)                                                   \
  typedef float name##_vec __attribute__((vector_size(bytes)));                              \
  __attribute__((__VA_ARGS__)) double name(float* sink) {                                    \
    constexpr int kRounds = 2000000, kChains = 12, kLanes = bytes / 4;                       \
    name##_vec a[kChains], b = {}, c = {};                                                   \
    for (unsigned i = 0; i < kLanes; ++i) b[i] = 1.0F + 1e-7F * *sink, c[i] = 1e-9F + *sink; \
    for (int i = 0; i < kChains; ++i) a[i] = c * static_cast<float>(i);                      \
    for (int round = 0; round < kRounds; ++round) {                                          \
      _Pragma("GCC unroll 12") for (int i = 0; i < kChains; ++i) a[i] = a[i] * b + c;        \
    }                                                                                        \
    for (int i = 1; i < kChains; ++i) a[0] += a[i];                                          \
    *sink = a[0][0] * 1e-30F;                                                                \
    return 2.0 * kRounds * kChains * kLanes;                                                 \
  }
#if defined(__x86_64__)
DELTAIC_FMA_LOOP(fma_avx512, 64, target("avx512f"), optimize("fp-contract=fast"))
DELTAIC_FMA_LOOP(fma_avx2, 32, target("avx2,fma"), optimize("fp-contract=fast"))
#endif
DELTAIC_FMA_LOOP(fma_baseline, 16, optimize("fp-contract=fast"))

}  // namespace

double measure_read_bandwidth(ThreadPool& threads) {
  constexpr std::int64_t kBytes = std::int64_t{512} << 20, kTask = std::int64_t{1} << 20;
  const Tensor memory(DType::i64, {kBytes / 8});
  std::fill_n(memory.as<std::int64_t>(), kBytes / 8, 1);
  std::vector<std::int64_t> sums(kBytes / kTask);
  const Clock clock(threads);
  double best = 0.0;
  for (int pass = 0; pass < 8; ++pass) {
    const double start = clock.seconds();
    threads.parallel_for(kBytes / kTask, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t* data = memory.as<std::int64_t>() + task * (kTask / 8);
        std::int64_t sum[8] = {};
        for (std::int64_t i = 0; i < kTask / 8; i += 8)
          for (int j = 0; j < 8; ++j) sum[j] += data[i + j];
        for (const std::int64_t part : sum) sums[task] += part;
      }
    });
    best = std::max(best, static_cast<double>(kBytes) / (clock.seconds() - start) * 1e-9);
  }
  return best;
}

double measure_fma_peak(ThreadPool& threads) {
  std::vector<float> sinks(static_cast<std::size_t>(threads.num_threads()) * 64);
  std::vector<double> flops(sinks.size());
  const Clock clock(threads);
  double best = 0.0;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = clock.seconds();
    threads.parallel_for(threads.num_threads(), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
#if defined(__x86_64__)
        flops[i * 64] = is_available(Isa::avx512) ? fma_avx512(&sinks[i * 64])
                        : is_available(Isa::avx2) ? fma_avx2(&sinks[i * 64])
                                                  : fma_baseline(&sinks[i * 64]);
#else
        flops[i * 64] = fma_baseline(&sinks[i * 64]);
#endif
      }
    });
    double total = 0.0;
    for (int i = 0; i < threads.num_threads(); ++i) total += flops[static_cast<std::size_t>(i) * 64];
    best = std::max(best, total / (clock.seconds() - start) * 1e-9);
  }
  return best;
}

}  // namespace deltaic::cpu

// Times the state copies in the shape of Qwen3.5-35B-A3B: 30 layers, conv 8192 x 3 bf16, temporal 32 x 128 x 128 f32.
// Usage: bench_state_copy [requests ...]. Prints GB/s of bytes read plus written, and the share of the copy bound.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/kernels/graph_timing.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/core/transfer.h"
#include "cpp/src/ops/batch_memcpy.h"
#include "cpp/src/ops/state_copy.h"
#include "cuda/check.h"
#include "cuda/launch.cuh"

namespace deltaic::bench {
namespace {

using cuda::check;

constexpr int kLayers = 30;
constexpr std::int64_t kConvBytes = 8192 * 3 * 2, kTemporalBytes = 32 * 128 * 128 * 4;
constexpr std::int64_t kPageBytes = kConvBytes + kTemporalBytes;
constexpr double kBound = 4.18e12;                             // bytes a second of a large copy, read plus written
constexpr std::int64_t kRotatedBytes = std::int64_t{1} << 30;  // buffers that a graph goes through, beyond any cache
const Device kDevice{DeviceType::cuda, 0};

__global__ void fill_kernel(std::uint64_t* words, std::int64_t num_words, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < num_words;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ULL + seed;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    words[i] = x ^ (x >> 31);
  }
}

// Counts the 8-byte words in which two pages differ.
__global__ void compare_kernel(const std::uint64_t* a, const std::uint64_t* b, std::int64_t num_words,
                               unsigned long long* num_different) {
  unsigned long long count = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < num_words;
       i += std::int64_t{gridDim.x} * blockDim.x)
    count += a[i] != b[i];
  if (count > 0) atomicAdd(num_different, count);
}

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()), buffer_(size_ * sizeof(T), kDevice) {
    cuda::copy_and_wait(buffer_.data(), values.data(), size_ * sizeof(T));
  }
  TensorView view(DType dtype) const {
    return make_view(buffer_.data(), dtype, {static_cast<std::int64_t>(size_)}, kDevice);
  }
  T* data() const { return static_cast<T*>(buffer_.data()); }
  std::vector<T> host() const {
    std::vector<T> values(size_);
    cuda::copy_and_wait(values.data(), buffer_.data(), size_ * sizeof(T));
    return values;
  }

 private:
  std::size_t size_;
  Buffer buffer_;
};

int num_sets_for(int num_reqs) {
  const std::int64_t step_bytes = 2 * kPageBytes * kLayers * num_reqs;
  return static_cast<int>(std::max<std::int64_t>(2, (kRotatedBytes + step_bytes - 1) / step_bytes));
}

// Slots for num_sets_for(max_reqs) independent steps of max_reqs requests; a step copies slot 2r + 1 to slot 2r + 2.
class Pool {
 public:
  Pool(int max_reqs, cudaStream_t stream)
      : num_slots_(std::int64_t{2} * max_reqs * num_sets_for(max_reqs) + 1),
        buffer_(static_cast<std::size_t>(num_slots_ * kPageBytes * kLayers), kDevice),
        stream_(stream) {}

  void fill() const {
    const cuda::Launch launch{.grid = dim3(1024), .block = dim3(256), .stream = stream_};
    launch(fill_kernel, static_cast<std::uint64_t*>(buffer_.data()), num_slots_ * kPageBytes * kLayers / 8,
           std::uint64_t{42});
  }

  char* page(int layer, std::int64_t slot) const {
    return static_cast<char*>(buffer_.data()) + (layer * num_slots_ + slot) * kPageBytes;
  }
  std::int64_t num_slots() const { return num_slots_; }

  // Words of the destinations of a set that are not what the sources have.
  unsigned long long num_wrong(int num_reqs, int set) const {
    const DeviceVector<unsigned long long> count({0ULL});
    const cuda::Launch launch{.grid = dim3(256), .block = dim3(256), .stream = stream_};
    for (int layer = 0; layer < kLayers; ++layer)
      for (int r = set * num_reqs; r < (set + 1) * num_reqs; ++r)
        launch(compare_kernel, reinterpret_cast<const std::uint64_t*>(page(layer, 2 * r + 1)),
               reinterpret_cast<const std::uint64_t*>(page(layer, 2 * r + 2)), kPageBytes / 8, count.data());
    return count.host()[0];
  }

 private:
  std::int64_t num_slots_;
  Buffer buffer_;
  cudaStream_t stream_;
};

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void report(const char* name, int num_reqs, GraphTiming time, double bytes) {
  const double rate = bytes / (time.median_us * 1e-6);
  std::printf("%-40s %4d  %9.2f us (best %9.2f)  %7.0f GB/s  %5.1f %%\n", name, num_reqs, time.median_us, time.best_us,
              rate / 1e9, 100 * rate / kBound);
}

void bench_copies(const Pool& pool, int num_reqs, cudaStream_t stream) {
  const int num_sets = num_sets_for(num_reqs);
  pool.fill();
  const ops::Context ctx{.device = kDevice, .stream = {stream}};
  const double bytes = 2.0 * static_cast<double>(kPageBytes) * kLayers * num_reqs;

  struct Set {
    DeviceVector<std::int64_t> src, dst;
    DeviceVector<std::int32_t> sizes;
  };
  std::vector<Set> sets;
  for (int set = 0; set < num_sets; ++set) {
    std::vector<std::int64_t> src, dst;
    std::vector<std::int32_t> sizes;
    for (int r = set * num_reqs; r < (set + 1) * num_reqs; ++r)
      for (int layer = 0; layer < kLayers; ++layer)
        for (const auto& [offset, size] : {std::pair{std::int64_t{0}, kConvBytes}, {kConvBytes, kTemporalBytes}}) {
          src.push_back(reinterpret_cast<std::int64_t>(pool.page(layer, 2 * r + 1) + offset));
          dst.push_back(reinterpret_cast<std::int64_t>(pool.page(layer, 2 * r + 2) + offset));
          sizes.push_back(static_cast<std::int32_t>(size));
        }
    sets.push_back({DeviceVector(src), DeviceVector(dst), DeviceVector(sizes)});
  }
  const auto copy = [&](int set) {
    ops::batch_memcpy(ctx, sets[set].src.view(DType::i64), sets[set].dst.view(DType::i64),
                      sets[set].sizes.view(DType::i32));
  };
  require(pool.num_wrong(num_reqs, 0) > 0, "the pool is not random");
  copy(0);
  require(pool.num_wrong(num_reqs, 0) == 0, "batch_memcpy is wrong");
  report("batch_memcpy", num_reqs, time_in_graph(stream, 2 * num_sets, [&](int i) { copy(i % num_sets); }), bytes);
}

// 2 computed blocks of 16 tokens are completed (or not, when nothing crosses): column 0 is copied to column 1.
void bench_postprocess(const Pool& pool, int num_reqs, bool crossing, cudaStream_t stream) {
  const int num_sets = crossing ? num_sets_for(num_reqs) : 1;
  pool.fill();
  const ops::Context ctx{.device = kDevice, .stream = {stream}};
  std::vector<DeviceVector<std::int32_t>> tables;
  std::vector<ops::StateCopyPlan> plans;
  for (int set = 0; set < num_sets; ++set) {
    std::vector<std::int32_t> table;
    for (int r = set * num_reqs; r < (set + 1) * num_reqs; ++r) table.insert(table.end(), {2 * r + 1, 2 * r + 2});
    tables.emplace_back(table);
    std::vector<ops::StateTensor> states;
    for (int layer = 0; layer < kLayers; ++layer) {
      TensorView conv = make_view(pool.page(layer, 0), DType::bf16, {pool.num_slots(), 3, 8192}, kDevice);
      TensorView temporal =
          make_view(pool.page(layer, 0) + kConvBytes, DType::f32, {pool.num_slots(), 32 * 128 * 128}, kDevice);
      conv.stride[0] = kPageBytes / 2;
      temporal.stride[0] = kPageBytes / 4;
      states.push_back(ops::conv_state(conv, ops::ConvLayout::sd, 0));
      states.push_back(ops::temporal_state(temporal, 0));
    }
    const TensorView view = make_view(tables.back().data(), DType::i32, {num_reqs, 2}, kDevice);
    plans.emplace_back(states, std::span(&view, 1), 16, kDevice);
  }
  const auto vector = [&](std::int32_t value) { return DeviceVector(std::vector<std::int32_t>(num_reqs, value)); };
  const auto accepted = vector(crossing ? 3 : 1), state_idx = vector(0), computed = vector(crossing ? 30 : 3),
             scheduled = vector(2), drafts = vector(0), out = vector(-1);
  const ops::StateCopyInputs inputs{.num_accepted_tokens = accepted.view(DType::i32),
                                    .state_idx = state_idx.view(DType::i32),
                                    .num_computed_tokens = computed.view(DType::i32),
                                    .num_scheduled_tokens = scheduled.view(DType::i32),
                                    .num_draft_tokens = drafts.view(DType::i32)};
  const auto run = [&](int set) { ops::postprocess_states(ctx, plans[set], num_reqs, inputs, out.view(DType::i32)); };
  run(0);
  require(out.host() == std::vector<std::int32_t>(num_reqs, crossing ? 3 : 1), "postprocess counts are wrong");
  require((pool.num_wrong(num_reqs, 0) == 0) == crossing, "postprocess bytes are wrong");
  if (crossing) {
    const double bytes = 2.0 * static_cast<double>(kPageBytes) * kLayers * num_reqs;
    report("fused postprocess, all copy", num_reqs,
           time_in_graph(stream, 2 * num_sets, [&](int i) { run(i % num_sets); }), bytes);
  } else {
    const GraphTiming time = time_in_graph(stream, 100, [&](int) { run(0); });
    std::printf("%-40s %4d  %9.2f us (best %9.2f)\n", "fused postprocess, nothing crosses", num_reqs, time.median_us,
                time.best_us);
  }
}

// The bound, measured the same way: one copy of 256 MiB by the driver.
void bench_driver_copy(cudaStream_t stream) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const Buffer src(4 * kBytes, kDevice), dst(4 * kBytes, kDevice);
  const GraphTiming time = time_in_graph(stream, 8, [&](int i) {
    check(cudaMemcpyAsync(static_cast<char*>(dst.data()) + i % 4 * kBytes,
                          static_cast<const char*>(src.data()) + i % 4 * kBytes, kBytes, cudaMemcpyDeviceToDevice,
                          stream));
  });
  report("cudaMemcpyAsync of 256 MiB", 1, time, 2.0 * kBytes);
}

void print_device() {
  cudaDeviceProp properties{};
  int driver = 0;
  check(cudaGetDeviceProperties(&properties, 0));
  check(cudaDriverGetVersion(&driver));
  std::printf("%s, %d SMs, driver API %d; bound %.2f TB/s read plus written\n", properties.name,
              properties.multiProcessorCount, driver, kBound / 1e12);
}

}  // namespace

int main(const std::vector<std::string>& arguments) {
  std::vector<int> sizes;
  for (const std::string& argument : arguments) sizes.push_back(std::stoi(argument));
  if (sizes.empty()) sizes = {1, 8, 32, 128};
  const Stream stream;
  print_device();
  bench_driver_copy(stream.handle);
  const Pool pool(std::max(128, *std::max_element(sizes.begin(), sizes.end())), stream.handle);
  for (const int num_reqs : sizes) bench_copies(pool, num_reqs, stream.handle);
  for (const int num_reqs : sizes) bench_postprocess(pool, num_reqs, true, stream.handle);
  for (const int num_reqs : {1, 128, 256}) bench_postprocess(pool, num_reqs, false, stream.handle);
  return 0;
}

}  // namespace deltaic::bench

int main(int argc, char** argv) {
  try {
    return deltaic::bench::main({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_state_copy: %s\n", error.what());
    return 1;
  }
}

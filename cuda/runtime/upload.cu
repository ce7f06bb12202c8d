// Weights on their way to a device.
//   upload: the host fills one pinned buffer while the copy engine empties the other; tensors lie in a buffer after
//   another, and what must be converted goes through device memory of the same layout
//   fill: 8 elements a thread; bound by memory, or by its 64-bit products
#include "cpp/src/core/upload.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cpp/src/check.h"
#include "cpp/src/core/buffer.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/core/uniform.h"
#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"

namespace deltaic::cuda {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{64} << 20, kAlignment = 256;
constexpr std::int64_t kCopyGrain = std::int64_t{1} << 20;  // bytes that a thread copies at least
constexpr int kMaxCopyThreads = 8;
constexpr int kThreads = 256, kPerThread = 8;

template <class S, class T>
__global__ void __launch_bounds__(kThreads) convert_kernel(const S* src, std::int64_t count, T* dst) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride)
    dst[i] = from_float<T>(to_float(src[i]));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_uniform_kernel(T* dst, std::int64_t count, std::uint64_t seed, float centre, float scale) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPerThread;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (first + i < count) dst[first + i] = from_float<T>(uniform(seed, first + i, centre, scale));
}

unsigned num_blocks(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

using PinnedMemory = Unique<void*, cudaFreeHost>;

struct Slot {
  PinnedMemory pinned;
  Buffer device;  // made when something must be converted
  UniqueEvent emptied;
  std::size_t num_used_bytes = 0;
};

class StagedUploader final : public Uploader {
 public:
  explicit StagedUploader(int device_index)
      : device_index_(device_index), threads_(std::min(available_processors(), kMaxCopyThreads)) {
    const DeviceGuard guard(device_index_);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream);
    for (Slot& slot : slots_) {
      void* memory = nullptr;
      check(cudaHostAlloc(&memory, kBufferBytes, cudaHostAllocDefault));
      slot.pinned.reset(memory);
      cudaEvent_t event = nullptr;
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      slot.emptied.reset(event);
    }
  }
  ~StagedUploader() override { (void)cudaStreamSynchronize(stream_.get()); }

  void upload(const TensorView& src, const TensorView& dst) override {
    DELTAIC_CHECK(src.numel() == dst.numel() && src.is_contiguous() && dst.is_contiguous(), "upload of ", src.numel(),
                  " elements to ", dst.numel());
    const DeviceGuard guard(device_index_);
    const auto src_bytes = static_cast<std::int64_t>(size_of(src.dtype));
    const auto dst_bytes = static_cast<std::int64_t>(size_of(dst.dtype));
    const std::int64_t count = src.numel();
    for (std::int64_t begin = 0; begin < count;) {
      const std::size_t offset = reserve(static_cast<std::size_t>((count - begin) * src_bytes));
      const auto room = static_cast<std::int64_t>(kBufferBytes - offset);
      const std::int64_t size = std::min(count - begin, room / src_bytes);
      upload_piece(static_cast<const char*>(src.data) + begin * src_bytes, src.dtype, size, offset,
                   make_view(static_cast<char*>(dst.data) + begin * dst_bytes, dst.dtype, {size}, dst.device));
      begin += size;
    }
  }

  void finish() override { check(cudaStreamSynchronize(stream_.get())); }

 private:
  // Where in the current buffer the next bytes go: the other buffer is taken when not all fit, and as many as do there.
  std::size_t reserve(std::size_t num_bytes) {
    Slot* slot = &slots_[current_];
    std::size_t offset = (slot->num_used_bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (offset > 0 && num_bytes > kBufferBytes - std::min(offset, kBufferBytes)) {
      check(cudaEventRecord(slot->emptied.get(), stream_.get()));
      current_ = 1 - current_;
      slot = &slots_[current_];
      check(cudaEventSynchronize(slot->emptied.get()));
      offset = 0;
    }
    slot->num_used_bytes = offset + std::min(num_bytes, kBufferBytes - offset);
    return offset;
  }

  void upload_piece(const char* src, DType src_dtype, std::int64_t count, std::size_t offset, const TensorView& dst) {
    Slot& slot = slots_[current_];
    char* pinned = static_cast<char*>(slot.pinned.get()) + offset;
    const std::int64_t num_bytes = count * static_cast<std::int64_t>(size_of(src_dtype));
    threads_.parallel_for(num_bytes, kCopyGrain, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(pinned + begin, src + begin, static_cast<std::size_t>(end - begin));
    });
    void* target = dst.data;
    if (src_dtype != dst.dtype) {
      if (slot.device.num_bytes() == 0) slot.device = Buffer(kBufferBytes, {DeviceType::cuda, device_index_});
      target = static_cast<char*>(slot.device.data()) + offset;
    }
    check(cudaMemcpyAsync(target, pinned, static_cast<std::size_t>(num_bytes), cudaMemcpyHostToDevice, stream_.get()));
    if (src_dtype == dst.dtype) return;
    visit_float(src_dtype, [&]<class S>(S) {
      visit_float(dst.dtype, [&]<class T>(T) {
        const Launch launch{.grid = dim3(std::min(num_blocks(count, kThreads), 4096U)),
                            .block = dim3(kThreads),
                            .stream = stream_.get()};
        launch(convert_kernel<S, T>, static_cast<const S*>(target), count, static_cast<T*>(dst.data));
      });
    });
  }

  int device_index_;
  ThreadPool threads_;
  std::array<Slot, 2> slots_;
  int current_ = 0;
  UniqueStream stream_;  // destroyed first
};

}  // namespace

std::unique_ptr<Uploader> make_uploader(int device_index) { return std::make_unique<StagedUploader>(device_index); }

void fill_uniform(const TensorView& dst, std::uint64_t seed, float centre, float scale) {
  const DeviceGuard guard(dst.device.index);
  visit_float(dst.dtype, [&]<class T>(T) {
    const Launch launch{.grid = dim3(num_blocks(dst.numel(), std::int64_t{kThreads} * kPerThread)),
                        .block = dim3(kThreads),
                        .stream = nullptr};
    launch(fill_uniform_kernel<T>, static_cast<T*>(dst.data), dst.numel(), seed, centre, scale);
  });
}

}  // namespace deltaic::cuda

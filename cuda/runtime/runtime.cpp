#include "cpp/src/core/cuda_runtime.h"

#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace deltaic::cuda {

namespace {

cudaStream_t native(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle()); }

}  // namespace

CurrentDevice::CurrentDevice(Device device) {
  if (device.type != DeviceType::cuda) return;
  index_ = device.index;
  check(cudaGetDevice(&previous_));
  if (previous_ != index_) check(cudaSetDevice(index_));
}

CurrentDevice::~CurrentDevice() {
  if (previous_ != index_) (void)cudaSetDevice(previous_);
}

Stream::Stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  handle_ =
      std::shared_ptr<void>(stream, [](void* handle) { (void)cudaStreamDestroy(static_cast<cudaStream_t>(handle)); });
}

void Stream::wait() const { check(cudaStreamSynchronize(native(*this))); }

Event::Event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  handle_ =
      std::shared_ptr<void>(event, [](void* handle) { (void)cudaEventDestroy(static_cast<cudaEvent_t>(handle)); });
}

void Event::record(const Stream& stream) const {
  check(cudaEventRecord(static_cast<cudaEvent_t>(handle_.get()), native(stream)));
}

void Event::wait() const { check(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_.get()))); }

PinnedBuffer::PinnedBuffer(std::size_t num_bytes) : num_bytes_(num_bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, num_bytes > 0 ? num_bytes : 1, cudaHostAllocPortable));
  data_ = std::shared_ptr<void>(memory, [](void* pointer) { (void)cudaFreeHost(pointer); });
}

Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) {
  // Thread-local: other engines of the process may allocate meanwhile.
  check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t recorded = nullptr;
  try {
    enqueue();
  } catch (...) {
    (void)cudaStreamEndCapture(native(stream), &recorded);
    if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
    (void)cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(native(stream), &recorded));
  const std::unique_ptr<CUgraph_st, decltype([](cudaGraph_t graph) { (void)cudaGraphDestroy(graph); })> owner(recorded);
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, recorded, 0));
  handle_ = std::shared_ptr<void>(
      executable, [](void* handle) { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle)); });
  check(cudaGraphUpload(executable, native(stream)));
}

void Graph::launch(const Stream& stream) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_.get()), native(stream)));
}

void copy_async(const Stream& stream, void* dst, const void* src, std::size_t num_bytes) {
  check(cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDefault, native(stream)));
}

void fill_async(const Stream& stream, void* data, unsigned char value, std::size_t num_bytes) {
  check(cudaMemsetAsync(data, value, num_bytes, native(stream)));
}

DeviceMemory device_memory(int device_index) {
  const CurrentDevice current({DeviceType::cuda, device_index});
  std::size_t free_bytes = 0, total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.free_bytes = static_cast<std::int64_t>(free_bytes), .total_bytes = static_cast<std::int64_t>(total_bytes)};
}

std::string device_name(int device_index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device_index));
  return properties.name;
}

}  // namespace deltaic::cuda

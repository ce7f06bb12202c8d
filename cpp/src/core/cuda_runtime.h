#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include <deltaic/device.h>

// What an engine on a CUDA device is made of, without CUDA's headers. A handle belongs to the device that is current
// when it is made (CurrentDevice). Everything throws DeviceError where the driver refuses, and Unsupported in a build
// without CUDA.

namespace deltaic::cuda {

// Makes a device the current one of this thread as long as it lives. Nothing happens for the CPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int index_ = -1, previous_ = -1;
};

class Stream {
 public:
  Stream();
  void* handle() const { return handle_.get(); }
  // Blocks until all that was enqueued is done.
  void wait() const;

 private:
  std::shared_ptr<void> handle_;
};

// A point of a stream.
class Event {
 public:
  Event();
  void record(const Stream& stream) const;
  // Blocks until what was enqueued before the last record() is done; returns at once without one.
  void wait() const;

 private:
  std::shared_ptr<void> handle_;
};

// Host memory that the device reads and writes at the same address. Not zeroed.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(std::size_t num_bytes);
  std::byte* data() const { return static_cast<std::byte*>(data_.get()); }
  std::size_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<void> data_;
  std::size_t num_bytes_ = 0;
};

// Work that was recorded once and can be enqueued many times.
class Graph {
 public:
  // Records what `enqueue` enqueues on the stream; none of it runs. Work that is in the stream already goes on.
  Graph(const Stream& stream, const std::function<void()>& enqueue);
  void launch(const Stream& stream) const;

 private:
  std::shared_ptr<void> handle_;
};

// Enqueues a copy between any two memories; host memory must be pinned.
void copy_async(const Stream& stream, void* dst, const void* src, std::size_t num_bytes);
// Enqueues setting every byte.
void fill_async(const Stream& stream, void* data, unsigned char value, std::size_t num_bytes);

DeviceMemory device_memory(int device_index);
std::string device_name(int device_index);

}  // namespace deltaic::cuda

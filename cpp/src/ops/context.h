#pragma once

#include <deltaic/tensor.h>

namespace deltaic {
class ThreadPool;
namespace cuda {
class Matmul;
}
}  // namespace deltaic

namespace deltaic::ops {

// A CUDA stream (cudaStream_t) without CUDA's headers; null on the CPU.
struct Stream {
  void* handle = nullptr;
};

// Where an op runs. On the CPU ops run at once, on all of `threads`; on CUDA they enqueue on `stream`.
struct Context {
  Device device{};
  Stream stream{};
  ThreadPool* threads = nullptr;
  cuda::Matmul* matmul = nullptr;  // CUDA: products of many tokens (core/matmul.h); of this stream alone
};

}  // namespace deltaic::ops

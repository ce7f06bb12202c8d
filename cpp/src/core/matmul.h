#pragma once

#include <memory>

namespace deltaic::cuda {

// cuBLASLt on one device, for products of many tokens: its library, handle, workspace and plans. Used from one thread
// and one stream at a time. An engine owns one.
class Matmul;

// Never fails: whether cuBLASLt can be loaded shows when it is needed. Throws Unsupported in a build without CUDA.
std::shared_ptr<Matmul> make_matmul(int device_index);

}  // namespace deltaic::cuda

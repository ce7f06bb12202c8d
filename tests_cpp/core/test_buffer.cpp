#include <doctest/doctest.h>

#include <cstdint>
#include <utility>

#include <deltaic/error.h>

#include "cpp/src/core/buffer.h"

namespace deltaic {
namespace {

TEST_CASE("a buffer is aligned and zeroed") {
  for (const std::size_t num_bytes : {1, 63, 64, 1000, 1 << 20}) {
    const Buffer buffer(num_bytes, Device{});
    CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 == 0);
    const char* data = static_cast<const char*>(buffer.data());
    std::size_t num_set = 0;
    for (std::size_t i = 0; i < num_bytes; ++i) num_set += data[i] != 0;
    CHECK(num_set == 0);
  }
}

TEST_CASE("a moved buffer is empty") {
  Buffer first(100, Device{});
  void* data = first.data();
  Buffer second = std::move(first);
  CHECK(second.data() == data);
  CHECK(second.num_bytes() == 100);
  CHECK(first.data() == nullptr);  // NOLINT: moved from on purpose
  CHECK(first.num_bytes() == 0);
}

TEST_CASE("a buffer that does not fit says how large it was to be") {
  CHECK_THROWS_WITH_AS(Buffer(SIZE_MAX, Device{}), "no memory for a buffer of 18446744073709551615 bytes on the host",
                       OutOfMemory);
  CHECK_THROWS_AS(Buffer(std::size_t{1} << 60, Device{}), OutOfMemory);
  CHECK_THROWS_AS(Tensor(DType::f32, {std::int64_t{1} << 40, std::int64_t{1} << 40}), InvalidArgument);
}

TEST_CASE("a tensor is a contiguous view of its own memory") {
  Tensor tensor(DType::bf16, {3, 0, 5});
  CHECK(tensor.view().numel() == 0);
  Tensor other(DType::i64, {2, 3});
  other.as<std::int64_t>()[5] = 7;
  tensor = std::move(other);
  CHECK(tensor.view().is_contiguous());
  CHECK(tensor.view().num_bytes() == 48);
  CHECK(tensor.as<std::int64_t>()[5] == 7);
}

}  // namespace
}  // namespace deltaic

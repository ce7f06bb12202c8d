#include <algorithm>
#include <cstring>
#include <vector>

#include <deltaic/error.h>
#include <doctest/doctest.h>

#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/batch_memcpy.h"
#include "tests_cpp/support/device_bytes.h"

using namespace deltaic;

namespace {

struct Copy {
  std::size_t src = 0, dst = 0, size = 0;
};

using test::random_bytes;

template <class Size>
constexpr DType kSizeType = sizeof(Size) == 4 ? DType::i32 : DType::i64;

// What is in `memory` after the copies, given as offsets into it, on `device`.
template <class Size>
std::vector<std::uint8_t> run(Device device, const std::vector<std::uint8_t>& memory, const std::vector<Copy>& copies) {
  ThreadPool threads(4);
  const test::DeviceVector<std::uint8_t> bytes(memory, device);
  std::vector<std::int64_t> src, dst;
  std::vector<Size> sizes;
  for (const Copy& copy : copies) {
    src.push_back(reinterpret_cast<std::int64_t>(bytes.data() + copy.src));
    dst.push_back(reinterpret_cast<std::int64_t>(bytes.data() + copy.dst));
    sizes.push_back(static_cast<Size>(copy.size));
  }
  const test::DeviceVector src_ptrs(src, device), dst_ptrs(dst, device);
  const test::DeviceVector size_vector(sizes, device);
  ops::batch_memcpy({.device = device, .threads = &threads}, src_ptrs.view(DType::i64), dst_ptrs.view(DType::i64),
                    size_vector.view(kSizeType<Size>));
  return bytes.host();
}

std::vector<std::uint8_t> reference(std::vector<std::uint8_t> memory, const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) std::memmove(memory.data() + copy.dst, memory.data() + copy.src, copy.size);
  return memory;
}

void check(const std::vector<std::uint8_t>& memory, const std::vector<Copy>& copies) {
  const auto expected = reference(memory, copies);
  for (const Device device : test::devices()) {
    CAPTURE(static_cast<int>(device.type));
    CHECK(run<std::int32_t>(device, memory, copies) == expected);
    CHECK(run<std::int64_t>(device, memory, copies) == expected);
  }
}

}  // namespace

TEST_CASE("batch_memcpy shifts overlapping rows to the left exactly (D01)") {
  constexpr std::size_t kRow = 32768, kRows = 128;
  std::vector<std::uint8_t> memory(kRow * kRows);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::uint8_t>(i % kRow % 251);
  for (const std::size_t shift : {1, 2, 4, 8, 15, 16, 17, 1024}) {
    CAPTURE(shift);
    std::vector<Copy> copies;
    for (std::size_t row = 0; row < kRows; ++row) copies.push_back({row * kRow + shift, row * kRow, kRow - shift});
    for (int repeat = 0; repeat < 10; ++repeat) {
      check(memory, copies);
      memory = reference(memory, copies);
    }
  }
}

TEST_CASE("batch_memcpy shifts overlapping rows to the right exactly") {
  constexpr std::size_t kRow = 32768, kRows = 16;
  const auto memory = random_bytes(kRow * kRows, 1);
  for (const std::size_t shift : {1, 2, 3, 4, 8, 16, 24, 4096, 20000}) {
    CAPTURE(shift);
    std::vector<Copy> copies;
    for (std::size_t row = 0; row < kRows; ++row) copies.push_back({row * kRow, row * kRow + shift, kRow - shift});
    check(memory, copies);
  }
}

TEST_CASE("batch_memcpy copies any offset and any size (D08)") {
  constexpr std::size_t kCell = 64;
  std::vector<Copy> copies;
  for (std::size_t src = 0; src < 16; ++src)
    for (std::size_t dst = 0; dst < 16; ++dst)
      for (std::size_t size = 0; size <= 40; ++size) {
        const std::size_t cell = copies.size() * 2 * kCell;
        copies.push_back({cell + src, cell + kCell + dst, size});
      }
  check(random_bytes(copies.size() * 2 * kCell, 2), copies);

  constexpr std::size_t kLarge = (std::size_t{2} << 20) + 64;
  const auto memory = random_bytes(2 * kLarge, 3);
  for (const auto& [src, dst] : {std::pair<std::size_t, std::size_t>{0, 0}, {3, 3}, {0, 8}, {4, 8}, {2, 4}, {1, 14}})
    for (const std::ptrdiff_t extra : {-7, -1, 0, 1, 7})
      check(memory, {{src, kLarge + dst, static_cast<std::size_t>((std::ptrdiff_t{2} << 20) + extra)}});
}

TEST_CASE("batch_memcpy mixes empty, small, large, self and overlapping copies [sanitizer]") {
  constexpr std::size_t kLarge = std::size_t{3} << 20;
  check(random_bytes(3 * kLarge, 4), {{0, kLarge, 0},
                                      {5, kLarge + 5, kLarge - 11},
                                      {0, kLarge, 1},
                                      {2 * kLarge + 40, 2 * kLarge, kLarge / 2},
                                      {3 * kLarge - 64, 3 * kLarge - 64, 64},
                                      {1, kLarge + 1, 0}});
}

TEST_CASE("batch_memcpy accepts an empty list and refuses what does not fit") {
  ThreadPool threads(1);
  std::vector<std::int64_t> values{0, 0}, negative{-1};
  std::vector<std::int32_t> narrow{0};
  const auto i64 = [&](std::int64_t n) { return make_view(values.data(), DType::i64, {n}); };
  const ops::Context ctx{.threads = &threads};
  ops::batch_memcpy(ctx, i64(0), i64(0), i64(0));
  CHECK_THROWS_WITH_AS(ops::batch_memcpy(ctx, i64(1), i64(2), i64(1)),
                       "batch_memcpy: 1 sources, 2 destinations, 1 sizes", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::batch_memcpy(ctx, make_view(narrow.data(), DType::i32, {1}), i64(1), i64(1)),
                       "batch_memcpy: addresses must be i64, are i32 and i64", InvalidArgument);
  CHECK_THROWS_WITH_AS(ops::batch_memcpy(ctx, i64(1), i64(1), make_view(negative.data(), DType::i64, {1})),
                       "batch_memcpy: sizes[0] is -1", InvalidArgument);
  // On CUDA the arguments are not read here: an empty list must not launch anything, device or not.
  ops::batch_memcpy({.device = {DeviceType::cuda, 0}}, make_view(nullptr, DType::i64, {0}, {DeviceType::cuda, 0}),
                    make_view(nullptr, DType::i64, {0}, {DeviceType::cuda, 0}),
                    make_view(nullptr, DType::i32, {0}, {DeviceType::cuda, 0}));
}

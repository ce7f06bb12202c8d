#include "cpp/src/layers/workspace.h"

#include <array>
#include <cstdint>

#include <deltaic/error.h>
#include <doctest/doctest.h>

using namespace deltaic;

TEST_CASE("a workspace hands out aligned tensors that do not overlap, and the same again after reset") {
  Workspace workspace(64 + 128 + 64, Device{});
  const TensorView a = workspace.take(DType::f32, {3, 5});
  const TensorView b = workspace.take(DType::u8, {65});
  const TensorView c = workspace.take(DType::i32, {16});
  const auto address = [](const TensorView& view) { return reinterpret_cast<std::uintptr_t>(view.data); };
  CHECK(address(a) % 64 == 0);
  CHECK(address(b) == address(a) + 64);
  CHECK(address(c) == address(b) + 128);
  CHECK(c.is_contiguous());
  CHECK(workspace.num_taken_bytes() == 256);
  CHECK_THROWS_WITH_AS(workspace.take(DType::u8, {1}),
                       "the workspace has 256 bytes, 256 are taken and 64 more are needed", InvalidArgument);
  workspace.reset();
  CHECK(workspace.take(DType::f32, {3, 5}).data == a.data);
}

TEST_CASE("a workspace without memory measures what is taken") {
  Workspace workspace;
  CHECK(workspace.take(DType::f32, {1000, 1000}).data == nullptr);
  workspace.take(DType::u8, {0});
  workspace.take(DType::u8, {1});
  CHECK(workspace.num_taken_bytes() == 4'000'000 + 64);
}

TEST_CASE("columns and heads are views with the row stride of their matrix") {
  std::array<float, 24> data{};
  const TensorView matrix = make_view(data.data(), DType::f32, {2, 12});
  const TensorView part = columns(matrix, 4, 6);
  CHECK(part.as<float>() == data.data() + 4);
  CHECK(part.stride[0] == 12);
  const TensorView heads = as_heads(part, 2, 3);
  CHECK(heads.rank == 3);
  CHECK(heads.shape[1] == 2);
  CHECK(heads.stride[0] == 12);
  CHECK(heads.stride[1] == 3);
  CHECK_THROWS_WITH_AS(columns(matrix, 8, 5), "columns [8, 13) of a matrix with 12", InvalidArgument);
  CHECK_THROWS_WITH_AS(as_heads(part, 2, 4), "rows of 6 elements are not 2 heads of 4", InvalidArgument);
}

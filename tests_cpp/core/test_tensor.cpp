#include <array>

#include <deltaic/error.h>
#include <deltaic/tensor.h>
#include <doctest/doctest.h>

using namespace deltaic;

TEST_CASE("a view knows its size, slices and reshapes") {
  std::array<float, 24> data{};
  const TensorView view = make_view(data.data(), DType::f32, {2, 3, 4});
  CHECK(view.numel() == 24);
  CHECK(view.num_bytes() == 96);
  CHECK(view.is_contiguous());
  CHECK(view.slice(1, 2).as<float>() == data.data() + 12);
  CHECK(view.reshape({6, 4}).stride[0] == 4);
}

TEST_CASE("a view refuses what does not fit, with the numbers") {
  std::array<float, 6> data{};
  TensorView view = make_view(data.data(), DType::f32, {2, 3});
  CHECK_THROWS_WITH_AS(view.slice(1, 3), "slice [1, 3) of a tensor with 2 rows", InvalidArgument);
  CHECK_THROWS_WITH_AS(view.reshape({5}), "reshape from 6 to 5 elements", InvalidArgument);
  CHECK_THROWS_AS(view.as<std::int32_t>(), InvalidArgument);
  CHECK_THROWS_AS(make_view(data.data(), DType::f32, {-1}), InvalidArgument);
  view.stride[0] = 4;
  CHECK_FALSE(view.is_contiguous());
}

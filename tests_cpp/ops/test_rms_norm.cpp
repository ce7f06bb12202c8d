#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/ops/rms_norm.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

constexpr float kEps = 1e-6F;

struct Backend {
  Device device;
  DType dtype;
};

// Activations are f32 on the CPU and any float on CUDA.
std::vector<Backend> backends() {
  std::vector<Backend> result;
  for (const Device device : test::devices())
    for (const DType dtype : test::kFloatTypes)
      if (dtype == DType::f32 || device.type == DeviceType::cuda) result.push_back({device, dtype});
  return result;
}

TEST_CASE("rms_norm agrees with the reference") {
  struct Case {
    std::int64_t num_tokens, hidden_size;
  };
  for (const auto& [device, dtype] : backends())
    for (const auto& [num_tokens, hidden_size] : {Case{0, 64}, Case{1, 1}, Case{3, 127}, Case{200, 96}, Case{17, 4096}})
      for (const bool in_place : {false, true}) {
        CAPTURE(int(device.type));
        CAPTURE(name(dtype));
        CAPTURE(num_tokens);
        CAPTURE(hidden_size);
        CAPTURE(in_place);
        const Tensor x = test::random({num_tokens, hidden_size}, dtype, 1);
        const Tensor weight = test::random({hidden_size}, DType::f32, 2);
        const Tensor input = test::copy_to(x, device), scale = test::copy_to(weight, device);
        const Tensor fresh = test::copy_to(test::filled({num_tokens, hidden_size}, dtype, NAN), device);
        const Tensor& y = in_place ? input : fresh;
        ops::rms_norm(test::context_of(device), input.view(), scale.view(), kEps, y.view());
        const auto expected = reference::rms_norm(test::values(x), test::values(weight), kEps);
        CHECK(test::max_error(test::values(test::copy_to(y, Device{})), expected) <=
              test::tolerance(dtype, hidden_size));
      }
}

TEST_CASE("gated_rms_norm agrees with the reference, z inside the rows of a projection") {
  for (const auto& [device, dtype] : backends())
    for (const std::int64_t dim : {1, 7, 16, 33, 128, 300}) {
      const std::int64_t num_tokens = 70, num_heads = 3;
      CAPTURE(int(device.type));
      CAPTURE(name(dtype));
      CAPTURE(dim);
      const Tensor x = test::random({num_tokens, num_heads, dim}, dtype, 1);
      const Tensor rows = test::random({num_tokens, num_heads, 2 * dim + 1}, dtype, 2, 30.0);
      const Tensor weight = test::random({dim}, DType::f32, 3);
      const auto gate_of = [&](const Tensor& tensor) {
        TensorView z = tensor.view();
        z.data = static_cast<char*>(z.data) + dim * static_cast<std::int64_t>(size_of(dtype));
        z.shape[2] = dim;
        return z;
      };
      const Tensor input = test::copy_to(x, device), projection = test::copy_to(rows, device);
      const Tensor y = test::copy_to(test::filled({num_tokens, num_heads, dim}, dtype, NAN), device);
      ops::gated_rms_norm(test::context_of(device), input.view(), gate_of(projection),
                          test::copy_to(weight, device).view(), kEps, y.view());
      auto expected = reference::rms_norm(test::values(x), test::values(weight), kEps);
      const auto gate = test::values(gate_of(rows));
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] *= reference::silu(gate[i]);
      CHECK(test::max_error(test::values(test::copy_to(y, Device{})), expected) <= test::tolerance(dtype, dim));
    }
}

TEST_CASE("rms_norm names the tensor that does not fit") {
  const Tensor x(DType::f32, {2, 8}), weight(DType::f32, {9}), y(DType::f32, {2, 8});
  CHECK_THROWS_WITH_AS(ops::rms_norm(test::cpu_context(), x.view(), weight.view(), kEps, y.view()),
                       "rms_norm: weight has shape [9], expected [8]", InvalidArgument);
}

}  // namespace
}  // namespace deltaic

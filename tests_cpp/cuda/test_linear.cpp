#include <doctest/doctest.h>

#include "cpp/src/core/matmul.h"
#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/embedding.h"
#include "cpp/src/ops/linear.h"
#include "cuda/gemm/streaming_linear.h"
#include "tests_cpp/support/on_device.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

struct Gpu {
  std::shared_ptr<cuda::Matmul> matmul = cuda::make_matmul(0);
  ops::Context context() const {
    return {.device = test::kGpu, .stream = {}, .threads = nullptr, .matmul = matmul.get()};
  }
};

struct LinearCase {
  DType dtype, out_dtype;
  std::int64_t num_tokens, out_features, in_features;
  bool accumulate, with_bias;
};

void check_linear(const Gpu& gpu, const LinearCase& c) {
  const std::int64_t m = c.num_tokens, n = c.out_features, k = c.in_features;
  CAPTURE(name(c.dtype));
  CAPTURE(name(c.out_dtype));
  CAPTURE(m);
  CAPTURE(n);
  CAPTURE(k);
  CAPTURE(c.accumulate);
  CAPTURE(c.with_bias);
  const Tensor x = test::random({m, k}, c.dtype, 1), w = test::random({n, k}, c.dtype, 2);
  const Tensor bias = test::random({n}, DType::f32, 3);
  const Tensor y0 = c.accumulate ? test::random({m, n}, c.out_dtype, 4) : test::filled({m, n}, c.out_dtype, NAN);
  auto expected = reference::linear(test::values(x), test::values(w), static_cast<std::size_t>(m),
                                    static_cast<std::size_t>(n), static_cast<std::size_t>(k));
  const auto b = test::values(bias), before = test::values(y0);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (c.with_bias) expected[i] += b[i % static_cast<std::size_t>(n)];
    if (c.accumulate) expected[i] += before[i];
  }
  const Tensor dx = test::to_gpu(x), dw = test::to_gpu(w), db = test::to_gpu(bias), dy = test::to_gpu(y0);
  ops::LinearOptions options{.bias = {}, .accumulate = c.accumulate};
  if (c.with_bias) options.bias = db.view();
  ops::linear(gpu.context(), dx.view(), test::weight_of(dw), options, dy.view());
  constexpr double kTerm = 1.0 / 3.0;  // root mean square of a product of two values uniform in [-1, 1]
  const double sums =
      c.dtype == DType::f32 ? test::ordered_sum_tolerance(k, kTerm) : test::tensor_sum_tolerance(k, kTerm);
  // cuBLASLt rounds the product before it is added to what is there, or the bias to it: none of these sums is larger
  // than 1 + |expected| by more than the parts still to come, so each rounding is worth one of the result's at most.
  const double roundings = m > 16 ? 1.0 + (c.accumulate ? 1.0 : 0.0) + (c.with_bias ? 1.0 : 0.0) : 1.0;
  const double limit = std::max(sums, roundings * test::tolerance(c.out_dtype, k));
  CHECK(test::max_error(test::values(test::to_host(dy)), expected) <= limit);
}

TEST_CASE("linear on CUDA agrees with the reference for few and many tokens, odd sizes, bias and accumulation") {
  if (!test::has_gpu()) return;
  const Gpu gpu;
  for (const DType dtype : test::kFloatTypes)
    for (const DType out_dtype : {dtype, DType::f32})
      for (const std::int64_t m : {1, 2, 8, 9, 16, 17, 70})
        for (const auto& [n, k] : {std::pair{24, 64}, {129, 128}, {300, 1088}, {7, 35}, {40, 704}})
          for (const bool accumulate : {false, true})
            for (const bool with_bias : {false, true})
              check_linear(gpu, {dtype, out_dtype, m, n, k, accumulate, with_bias});
}

TEST_CASE("every kernel of linear on CUDA, small: plain, streaming, cuBLASLt and the bias after it [sanitizer]") {
  if (!test::has_gpu()) return;
  const Gpu gpu;
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t m : {1, 7, 16, 24})
      for (const auto& [n, k] : {std::pair{24, 192}, {9, 35}})
        for (const bool accumulate : {false, true}) check_linear(gpu, {dtype, dtype, m, n, k, accumulate, !accumulate});
}

TEST_CASE("a row of linear on CUDA has the same bits in any batch of up to 16 tokens, in f32 in any") {
  if (!test::has_gpu()) return;
  const Gpu gpu;
  for (const DType dtype : test::kFloatTypes)
    for (const std::int64_t m : {5, 16, 67}) {
      if (m > 16 && dtype != DType::f32) continue;
      const std::int64_t n = 150, k = 576;
      const Tensor x = test::to_gpu(test::random({m, k}, dtype, 1)), w = test::to_gpu(test::random({n, k}, dtype, 2));
      const Tensor all = test::to_gpu(test::filled({m, n}, dtype, NAN)),
                   one = test::to_gpu(test::filled({m, n}, dtype, NAN));
      ops::linear(gpu.context(), x.view(), test::weight_of(w), all.view());
      for (std::int64_t t = 0; t < m; ++t)
        ops::linear(gpu.context(), x.view().slice(t, t + 1), test::weight_of(w), one.view().slice(t, t + 1));
      CHECK(test::bits(test::to_host(all)) == test::bits(test::to_host(one)));
    }
}

// Of n x k weights.
void check_fused_linear(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, bool norm, bool silu_mul) {
  CAPTURE(name(dtype));
  CAPTURE(m);
  CAPTURE(n);
  CAPTURE(norm);
  CAPTURE(silu_mul);
  const std::int64_t columns = silu_mul ? n / 2 : n;
  const Tensor x = test::random({m, k}, dtype, 1), w = test::random({n, k}, dtype, 2, 0.1);
  const Tensor norm_weight = test::random({k}, DType::f32, 3);
  auto rows = test::values(x);
  if (norm) rows = reference::rms_norm(rows, test::values(norm_weight), 1e-6);
  const auto all = reference::linear(rows, test::values(w), static_cast<std::size_t>(m), static_cast<std::size_t>(n),
                                     static_cast<std::size_t>(k));
  reference::Values expected;
  for (std::int64_t t = 0; t < m; ++t)
    for (std::int64_t i = 0; i < columns; ++i) {
      const double value = all[static_cast<std::size_t>(t * n + i)];
      expected.push_back(silu_mul ? reference::silu(value) * all[static_cast<std::size_t>(t * n + i + columns)]
                                  : value);
    }
  const Tensor dx = test::to_gpu(x), dw = test::to_gpu(w), dn = test::to_gpu(norm_weight);
  const Tensor dy = test::to_gpu(test::filled({m, columns}, dtype, NAN));
  cuda::StreamingLinearArgs args{.x = dx.view(),
                                 .weight = test::weight_of(dw),
                                 .norm_weight = {},
                                 .eps = 1e-6F,
                                 .bias = {},
                                 .silu_mul = silu_mul,
                                 .y = dy.view()};
  if (norm) args.norm_weight = dn.view();
  cuda::streaming_linear({}, args);
  CHECK(test::relative_error(test::values(test::to_host(dy)), expected) <= 1.5 * test::unit_roundoff(dtype));
}

TEST_CASE("streaming_linear fuses the norm before it and silu_mul after it") {
  if (!test::has_gpu()) return;
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t m : {1, 3, 8, 13})
      for (const bool norm : {false, true})
        for (const bool silu_mul : {false, true}) check_fused_linear(dtype, m, 302, 2112, norm, silu_mul);
}

TEST_CASE("streaming_linear, small: norm and silu_mul, more and fewer outputs than blocks [sanitizer]") {
  if (!test::has_gpu()) return;
  for (const std::int64_t m : {1, 5, 12})
    for (const std::int64_t n : {30, 1350})
      for (const bool fused : {false, true}) check_fused_linear(DType::bf16, m, n, 320, fused, fused);
}

TEST_CASE("embedding, silu_mul and sigmoid_mul on CUDA agree with their definitions [sanitizer]") {
  if (!test::has_gpu()) return;
  const ops::Context context{.device = test::kGpu};
  for (const auto& [dtype, size] : {std::pair<DType, std::int64_t>{DType::f32, 1100},
                                    {DType::f16, 1100},
                                    {DType::f16, 4104},
                                    {DType::bf16, 1100},
                                    {DType::bf16, 2072}}) {
    CAPTURE(name(dtype));
    CAPTURE(size);
    const std::int64_t m = 7;
    const Tensor table = test::random({13, size}, dtype, 1);
    const Tensor ids = test::ints({0, 12, 5, 5, -1, 13, 7}), dids = test::to_gpu(ids), dtable = test::to_gpu(table);
    const Tensor rows = test::to_gpu(test::filled({m, size}, dtype, NAN));
    ops::embedding(context, dids.view(), test::weight_of(dtable), rows.view());
    const auto got = test::values(test::to_host(rows)), all = test::values(table);
    for (std::int64_t t = 0; t < m; ++t) {
      const std::int64_t raw = ids.as<std::int32_t>()[t], id = raw < 0 || raw >= 13 ? 0 : raw;
      for (std::int64_t i = 0; i < size; ++i) REQUIRE(got[t * size + i] == all[id * size + i]);
    }

    const Tensor gate = test::random({m, size}, dtype, 2, 4.0), up = test::random({m, size}, dtype, 3);
    const Tensor dgate = test::to_gpu(gate), dup = test::to_gpu(up),
                 dy = test::to_gpu(test::filled({m, size}, dtype, NAN));
    ops::silu_mul(context, dgate.view(), dup.view(), dy.view());
    auto expected = test::values(gate);
    const auto ups = test::values(up);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = reference::silu(expected[i]) * ups[i];
    CHECK(test::max_error(test::values(test::to_host(dy)), expected) <= test::tolerance(dtype, 4));

    const Tensor x = test::random({m, 11, 100}, dtype, 4), gates = test::random({m, 11, 200}, dtype, 5, 4.0);
    const Tensor dx = test::to_gpu(x), dgates = test::to_gpu(gates);
    TensorView half = dgates.view();
    half.shape[2] = 100;
    ops::sigmoid_mul(context, half, dx.view());
    auto product = test::values(x);
    const auto g = test::values(gates);
    for (std::size_t i = 0; i < product.size(); ++i) product[i] *= reference::sigmoid(g[i / 100 * 200 + i % 100]);
    CHECK(test::max_error(test::values(test::to_host(dx)), product) <= test::tolerance(dtype, 4));
  }
}

}  // namespace
}  // namespace deltaic

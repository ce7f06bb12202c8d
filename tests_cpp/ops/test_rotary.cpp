#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/ops/rotary.h"
#include "tests_cpp/support/device_bytes.h"
#include "tests_cpp/support/reference.h"
#include "tests_cpp/support/tensors.h"
#include "tests_cpp/support/tolerance.h"

namespace deltaic {
namespace {

ModelConfig config_of(int head_dim, int rotary_dim) {
  ModelConfig model;
  model.head_dim = head_dim;
  model.rotary_dim = rotary_dim;
  model.max_position_embeddings = 40960;
  model.rope.theta = 1e6;
  return model;
}

TEST_CASE("rotary frequencies use rotary_dim, not head_dim") {
  const ops::RotaryTable table = ops::make_rotary_table(config_of(256, 64));
  REQUIRE(table.inv_freq.size() == 32);
  for (int j = 0; j < 32; ++j) CHECK(table.inv_freq[j] == doctest::Approx(std::pow(1e6, -2.0 * j / 64)).epsilon(1e-6));
  CHECK(table.attention_factor == 1.0F);
}

TEST_CASE("linear and yarn change the frequencies as they say") {
  ModelConfig model = config_of(128, 128);
  model.rope.type = RopeType::linear;
  model.rope.factor = 4.0;
  CHECK(ops::make_rotary_table(model).inv_freq[3] == doctest::Approx(std::pow(1e6, -6.0 / 128) / 4).epsilon(1e-6));

  model.rope.type = RopeType::yarn;
  model.rope.original_max_position_embeddings = 32768;
  model.rope.beta_fast = 32, model.rope.beta_slow = 1;
  const ops::RotaryTable table = ops::make_rotary_table(model);
  CHECK(table.attention_factor == doctest::Approx(0.1 * std::log(4.0) + 1.0));
  const auto dim = [](double n) { return 128 * std::log(32768 / (2 * 3.14159265358979 * n)) / (2 * std::log(1e6)); };
  const double low = std::floor(dim(32)), high = std::ceil(dim(1));
  for (int j = 0; j < 64; ++j) {
    const double theta = std::pow(1e6, -2.0 * j / 128), ramp = std::clamp((j - low) / (high - low), 0.0, 1.0);
    CHECK(table.inv_freq[j] == doctest::Approx(ramp * theta / 4 + (1 - ramp) * theta).epsilon(2e-6));
  }
  model.rope.attention_factor = 1.25;
  CHECK(ops::make_rotary_table(model).attention_factor == 1.25F);
}

TEST_CASE("interleaved M-RoPE gives each frequency its stream") {
  ModelConfig model = config_of(256, 64);
  model.rope.mrope_section = {11, 11, 10};
  const auto stream = ops::make_rotary_table(model).stream;
  for (int j = 0; j < 32; ++j) {
    const int expected = j % 3 == 1 && j < 33 ? 1 : j % 3 == 2 && j < 30 ? 2 : 0;
    CHECK(stream[j] == expected);
  }
}

struct Case {
  std::int64_t num_tokens, num_heads, num_kv_heads, dim, rotary_dim, num_streams;
  DType cache;
};

void check_qk_norm_rope(Device device, DType dtype) {
  for (const Case& c :
       {Case{1, 1, 1, 8, 8, 1, DType::f32}, Case{5, 4, 2, 24, 6, 3, DType::bf16}, Case{70, 3, 1, 37, 10, 1, DType::f16},
        Case{9, 8, 2, 256, 64, 3, DType::f32}, Case{33, 16, 2, 256, 64, 1, DType::bf16},
        Case{6, 4, 4, 128, 128, 1, DType::f16}, Case{7, 5, 1, 512, 512, 1, DType::f32},
        Case{1203, 3, 2, 256, 64, 1, DType::bf16}, Case{1601, 5, 2, 128, 64, 3, DType::f16}}) {
    CAPTURE(static_cast<int>(device.type));
    CAPTURE(name(dtype));
    CAPTURE(c.dim);
    CAPTURE(c.rotary_dim);
    ModelConfig model = config_of(static_cast<int>(c.dim), static_cast<int>(c.rotary_dim));
    if (c.num_streams == 3) model.rope.mrope_section = {1, 1, 1};
    const ops::RotaryTable table = ops::make_rotary_table(model);
    // q with a gate behind each head, as a gated projection lays them out.
    const Tensor q_rows = test::random({c.num_tokens, c.num_heads, 2 * c.dim}, dtype, 1);
    const Tensor k = test::random({c.num_tokens, c.num_kv_heads, c.dim}, dtype, 2);
    const Tensor v = test::random({c.num_tokens, c.num_kv_heads, c.dim}, dtype, 3);
    const Tensor q_weight = test::random({c.dim}, DType::f32, 4), k_weight = test::random({c.dim}, DType::f32, 5);
    const auto without_gate = [&](const Tensor& rows) {
      TensorView view = rows.view();
      view.shape[2] = c.dim;
      return view;
    };
    Tensor positions(DType::i64, {c.num_streams, c.num_tokens});
    Tensor slots(DType::i64, {c.num_tokens});
    const std::int64_t num_blocks = std::max<std::int64_t>(10, c.num_tokens / 8 + 1);
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      for (std::int64_t s = 0; s < c.num_streams; ++s)
        positions.as<std::int64_t>()[s * c.num_tokens + t] = 5 * t % 350 + 7 * s;
      slots.as<std::int64_t>()[t] = t % 4 == 2 ? -1 : (t * 7) % (8 * num_blocks);
    }
    const Tensor k_cache = test::filled({num_blocks, 8, c.num_kv_heads, c.dim}, c.cache, 9.0);
    const Tensor v_cache = test::filled({num_blocks, 8, c.num_kv_heads, c.dim}, c.cache, 9.0);

    const auto rotated = [&](const std::vector<double>& x, const Tensor& weight, std::int64_t heads) {
      auto y = reference::rms_norm(x, test::values(weight), 1e-6);
      for (std::int64_t t = 0; t < c.num_tokens; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t j = 0; j < c.rotary_dim / 2; ++j) {
            const std::int64_t stream = c.num_streams == 3 ? table.stream[j] : 0;
            const auto position = static_cast<double>(positions.as<std::int64_t>()[stream * c.num_tokens + t]);
            const double angle = position * table.inv_freq[j];
            double& a = y[(t * heads + h) * c.dim + j];
            double& b = y[(t * heads + h) * c.dim + j + c.rotary_dim / 2];
            const double first = a * std::cos(angle) - b * std::sin(angle);
            b = b * std::cos(angle) + a * std::sin(angle), a = first;
          }
      return y;
    };
    const auto expected_q = rotated(test::values(without_gate(q_rows)), q_weight, c.num_heads);
    const auto expected_k = rotated(test::values(k), k_weight, c.num_kv_heads);
    const auto expected_v = test::values(v), gates = test::values(q_rows);
    const Tensor device_q = test::copy_to(q_rows, device), device_k = test::copy_to(k, device);
    const Tensor device_k_cache = test::copy_to(k_cache, device), device_v_cache = test::copy_to(v_cache, device);
    const Tensor device_v = test::copy_to(v, device);
    const Tensor device_q_weight = test::copy_to(q_weight, device), device_k_weight = test::copy_to(k_weight, device);
    const Tensor device_positions = test::copy_to(positions, device), device_slots = test::copy_to(slots, device);
    ops::qk_norm_rope(test::context_of(device), {.q = without_gate(device_q),
                                                 .k = device_k.view(),
                                                 .v = device_v.view(),
                                                 .q_norm_weight = device_q_weight.view(),
                                                 .k_norm_weight = device_k_weight.view(),
                                                 .eps = 1e-6F,
                                                 .rotary = &table,
                                                 .positions = device_positions.view(),
                                                 .slot_mapping = device_slots.view(),
                                                 .k_cache = device_k_cache.view(),
                                                 .v_cache = device_v_cache.view()});
    const auto on_host = [](const Tensor& tensor) { return test::copy_to(tensor, Device{}); };
    // An angle of up to 359 radians is rounded to f32.
    const double tolerance = test::tolerance(DType::f32, c.dim) + 400.0 * test::unit_roundoff(DType::f32);
    const double own = dtype == DType::f32 ? 0.0 : test::unit_roundoff(dtype);
    const Tensor rows_after = on_host(device_q);
    CHECK(test::max_error(test::values(without_gate(rows_after)), expected_q) <= tolerance + own);
    CHECK(test::max_error(test::values(on_host(device_k)), expected_k) <= tolerance + own);
    const auto after = test::values(rows_after);
    int gates_changed = 0;
    for (std::size_t i = 0; i < gates.size(); ++i)
      gates_changed += static_cast<std::int64_t>(i) % (2 * c.dim) >= c.dim && after[i] != gates[i];
    CHECK(gates_changed == 0);

    std::vector<double> cached_k(static_cast<std::size_t>(k_cache.view().numel()), 9.0), cached_v = cached_k;
    const std::int64_t row = c.num_kv_heads * c.dim;
    for (std::int64_t t = 0; t < c.num_tokens; ++t)
      for (std::int64_t i = 0; i < row && slots.as<std::int64_t>()[t] >= 0; ++i) {
        cached_k[slots.as<std::int64_t>()[t] * row + i] = expected_k[t * row + i];
        cached_v[slots.as<std::int64_t>()[t] * row + i] = expected_v[t * row + i];
      }
    const double cache_tolerance = tolerance + test::unit_roundoff(c.cache);
    CHECK(test::max_error(test::values(on_host(device_k_cache)), cached_k) <= cache_tolerance);
    CHECK(test::max_error(test::values(on_host(device_v_cache)), cached_v) <= cache_tolerance);
  }
}

TEST_CASE("qk_norm_rope agrees with the reference and fills the caches at slot_mapping") {
  for (const Device device : test::devices())
    for (const DType dtype : test::kFloatTypes)
      if (dtype == DType::f32 || device.type == DeviceType::cuda) check_qk_norm_rope(device, dtype);
}

TEST_CASE("the caches round to nearest even") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const std::int64_t dim = 512;
    const Tensor q(DType::f32, {8, 1, dim}), k(DType::f32, {8, 1, dim}), weight(DType::f32, {dim});
    Tensor v = test::random({8, 1, dim}, DType::f32, 1, 3.0);
    const float special[] = {0.0F,           -0.0F,         65504.0F, 65519.9F,    65520.0F,    -70000.0F,
                             1e-8F,          2.9802322e-8F, 5.96e-8F, 6.1e-5F,     1e38F,       3.4e38F,
                             INFINITY,       -INFINITY,     NAN,      1.00390625F, 1.01171875F, 1.00048828125F,
                             1.00146484375F, 2049.0F,       2051.0F,  1e-40F,      4.57e-41F,   9.1e-41F};
    std::copy(std::begin(special), std::end(special), v.as<float>());
    const ops::RotaryTable table = ops::make_rotary_table(config_of(512, 2));
    const Tensor positions(DType::i64, {1, 8}), slots = test::longs({0, 1, 2, 3, 4, 5, 6, 7});
    const Tensor k_cache(dtype, {1, 8, 1, dim}), v_cache(dtype, {1, 8, 1, dim});
    ops::qk_norm_rope(test::cpu_context(), {.q = q.view(),
                                            .k = k.view(),
                                            .v = v.view(),
                                            .q_norm_weight = weight.view(),
                                            .k_norm_weight = weight.view(),
                                            .eps = 1e-6F,
                                            .rotary = &table,
                                            .positions = positions.view(),
                                            .slot_mapping = slots.view(),
                                            .k_cache = k_cache.view(),
                                            .v_cache = v_cache.view()});
    int wrong = 0;
    for (std::int64_t i = 0; i < v.view().numel(); ++i) {
      const double value = v.as<float>()[i], stored = test::element(v_cache.view(), i);
      wrong +=
          std::isnan(value) ? !std::isnan(stored) : v_cache.as<std::uint16_t>()[i] != test::to_16_bits(value, dtype);
    }
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace deltaic

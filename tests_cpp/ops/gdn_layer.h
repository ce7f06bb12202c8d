#pragma once

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "cpp/src/core/transfer.h"
#include "cpp/src/ops/gdn_mixer.h"
#include "tests_cpp/support/tensors.h"

// A random Gated DeltaNet layer, for the tests of gdn_mixer.
namespace deltaic::gdn_test {

enum class Layout { separate, grouped };

// |actual - expected| / |expected|; infinite when a value is not finite.
inline double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return INFINITY;
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]), norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// Values of a tensor's dtype, by the bits: test::to_16_bits is too slow for millions.
inline void fill_random(const Tensor& tensor, unsigned seed, float limit) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(-limit, limit);
  const std::int64_t size = tensor.view().numel();
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = uniform(engine);
    if (tensor.view().dtype == DType::bf16)
      tensor.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    else
      test::set_element(tensor.view(), i, value);
  }
}

inline Tensor on_device(const Tensor& tensor, Device device) {
  const TensorView& view = tensor.view();
  Tensor copy(view.dtype, std::span<const std::int64_t>(view.shape.data(), static_cast<std::size_t>(view.rank)),
              device);
  if (view.numel() == 0) return copy;
  if (device.type == DeviceType::cuda)
    cuda::copy_and_wait(copy.view().data, view.data, view.num_bytes());
  else
    std::memcpy(copy.view().data, view.data, view.num_bytes());
  return copy;
}
inline Tensor on_host(const Tensor& tensor) {
  if (tensor.view().device.type == DeviceType::cpu) return test::copy_of(tensor);
  const TensorView& view = tensor.view();
  Tensor copy(view.dtype, std::span<const std::int64_t>(view.shape.data(), static_cast<std::size_t>(view.rank)));
  cuda::copy_and_wait(copy.view().data, view.data, view.num_bytes());
  return copy;
}

// A layer's weights, projections of num_tokens tokens and states of num_slots slots, all on the host.
struct Layer {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  std::int64_t num_tokens, row, num_slots;
  Tensor proj, conv_weight, A_log, dt_bias, norm_weight, conv_state, temporal;

  Layer(ops::GdnShape s, Layout kind, DType dtype, DType state_dtype, std::int64_t tokens, std::int64_t slots)
      : shape(s), num_tokens(tokens), num_slots(slots) {
    const std::int64_t dk = s.key_head_dim, dv = s.value_head_dim, r = s.heads_per_group(), g = s.num_key_heads;
    const std::int64_t q = g * dk, v = s.num_value_heads * dv, group = 2 * dk + 2 * r * dv;
    if (kind == Layout::separate)
      layout = {.q = 0,
                .q_stride = dk,
                .k = q,
                .k_stride = dk,
                .v = 2 * q,
                .v_group_stride = r * dv,
                .z = 2 * q + v,
                .z_group_stride = r * dv,
                .b = 2 * q + 2 * v,
                .b_group_stride = r,
                .a = 2 * q + 2 * v + s.num_value_heads,
                .a_group_stride = r};
    else
      layout = {.q = 0,
                .q_stride = group,
                .k = dk,
                .k_stride = group,
                .v = 2 * dk,
                .v_group_stride = group,
                .z = 2 * dk + r * dv,
                .z_group_stride = group,
                .b = g * group,
                .b_group_stride = 2 * r,
                .a = g * group + r,
                .a_group_stride = 2 * r};
    row = (2 * q + 2 * v + 2 * s.num_value_heads + 15) / 8 * 8;
    proj = Tensor(dtype, {tokens, row});
    fill_random(proj, 1, 2.0F);
    conv_weight = test::random({s.conv_dim(), s.conv_kernel}, DType::f32, 2);
    A_log = test::random({s.num_value_heads}, DType::f32, 3);
    A_log.as<float>()[s.num_value_heads - 1] = std::log(16.0F);  // decays that vanish within a few tokens
    A_log.as<float>()[0] = -5.0F;                                // and some that last
    dt_bias = test::random({s.num_value_heads}, DType::f32, 4);
    norm_weight = test::random({dv}, DType::f32, 5);
    conv_state = Tensor(dtype, {slots, s.conv_dim(), s.conv_kernel - 1});
    fill_random(conv_state, 6, 1.0F);
    temporal = Tensor(state_dtype, {slots, s.num_value_heads, dv, dk});
    fill_random(temporal, 7, 0.5F);
  }

  void poison(std::int64_t slot) const {
    for (const Tensor* tensor : {&conv_state, &temporal}) {
      const TensorView view = tensor->view().slice(slot, slot + 1);
      for (std::int64_t i = 0; i < view.numel(); ++i) test::set_element(view, i, NAN);
    }
  }
  double input(std::int64_t t, std::int64_t at) const { return test::element(proj.view(), t * row + at); }
};

}  // namespace deltaic::gdn_test

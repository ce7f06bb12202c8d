#include "cpp/src/stages/streaming_conv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

namespace {

// The kept rows of the past, then x; the state moves on to the last rows.
std::vector<float> with_past(StreamState& state, int place, const Signal& x) {
  std::vector<float>& tail = state.tails[static_cast<std::size_t>(place)];
  std::vector<float> rows;
  rows.reserve(tail.size() + x.values.size());
  rows.insert(rows.end(), tail.begin(), tail.end());
  rows.insert(rows.end(), x.values.begin(), x.values.end());
  std::copy(rows.end() - static_cast<std::ptrdiff_t>(tail.size()), rows.end(), tail.begin());
  return rows;
}

// `length` rows of `width` values that start `channels` values after each other: they overlap.
TensorView overlapping_rows(std::vector<float>& values, std::int64_t first_row, std::int64_t length,
                            std::int64_t channels, std::int64_t width) {
  TensorView view = make_view(values.data() + first_row * channels, DType::f32, {length, width});
  view.stride[0] = channels;
  return view;
}

ops::Weight as_weight(const Tensor& tensor, std::int64_t first_row, std::int64_t out, std::int64_t in) {
  return {.view = make_view(tensor.as<float>() + first_row * in, DType::f32, {out, in}), .owner = {}};
}

// sin(z)^2 for |z| < kLargestAngle: z less a multiple of pi, then the sine's series. Good to 1e-6.
constexpr float kLargestAngle = 8192.0F;
inline float sin_squared(float z) {
  constexpr float kInversePi = 0.318309886F, kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kPi1 = 3.140625F, kPi2 = 9.67025756835938e-4F, kPi3 = 6.277114152908325e-7F,
                  kPi4 = 1.2154201256553420e-10F;  // they add up to pi
  const float n = (z * kInversePi + kRound) - kRound;
  const float r = (((z - n * kPi1) - n * kPi2) - n * kPi3) - n * kPi4;
  const float r2 = r * r;
  const float s =
      r + r * r2 *
              (-1.66666667e-1F +
               r2 * (8.33333333e-3F + r2 * (-1.98412698e-4F + r2 * (2.75573192e-6F + r2 * -2.50521084e-8F))));
  return s * s;
}

}  // namespace

StreamState StateLayout::make() const {
  StreamState state;
  for (const std::size_t size : sizes_) state.tails.emplace_back(size, 0.0F);
  state.num_skipped.assign(sizes_.size(), 0);
  return state;
}

StreamingConv StreamingConv::read(WeightReader& reader, StateLayout& layout, const std::string& name,
                                  std::int64_t in_channels, std::int64_t out_channels, int kernel, int dilation) {
  StreamingConv conv;
  conv.in_channels_ = in_channels, conv.out_channels_ = out_channels;
  const Tensor stored = reader.values(name + ".weight", {out_channels, in_channels, kernel});
  conv.bias_ = reader.values(name + ".bias", {out_channels});
  const bool is_one_product = dilation == 1;
  conv.num_groups_ = is_one_product ? 1 : kernel;
  conv.group_stride_ = dilation;
  conv.num_kept_ = std::int64_t{kernel - 1} * dilation;
  conv.weight_ = Tensor(DType::f32, {kernel * out_channels * in_channels});
  const float* from = stored.as<float>();
  float* to = conv.weight_.as<float>();
  for (std::int64_t o = 0; o < out_channels; ++o)
    for (std::int64_t i = 0; i < in_channels; ++i)
      for (std::int64_t j = 0; j < kernel; ++j) {
        const std::int64_t at =
            is_one_product ? (o * kernel + j) * in_channels + i : (j * out_channels + o) * in_channels + i;
        to[at] = from[(o * in_channels + i) * kernel + j];
      }
  conv.state_ = layout.add(static_cast<std::size_t>(conv.num_kept_ * in_channels));
  return conv;
}

Signal StreamingConv::forward(const ops::Context& ctx, StreamState& state, const Signal& x) const {
  Signal y(x.length, out_channels_);
  if (x.length == 0) return y;
  std::vector<float> rows = with_past(state, state_, x);
  const std::int64_t width = weight_.view().numel() / (num_groups_ * out_channels_);
  for (int group = 0; group < num_groups_; ++group)
    ops::linear(ctx, overlapping_rows(rows, group * group_stride_, x.length, in_channels_, width),
                as_weight(weight_, group * out_channels_, out_channels_, width),
                {.bias = group == 0 ? bias_.view() : TensorView{}, .accumulate = group > 0}, y.view());
  return y;
}

StreamingUpsample StreamingUpsample::read(WeightReader& reader, StateLayout& layout, const std::string& name,
                                          std::int64_t in_channels, std::int64_t out_channels, int kernel, int stride,
                                          bool trims_left) {
  DELTAIC_CHECK(kernel % stride == 0, name, " has a kernel of ", kernel, ", no multiple of its stride ", stride);
  StreamingUpsample up;
  up.in_channels_ = in_channels, up.out_channels_ = out_channels, up.stride_ = stride;
  const std::int64_t num_inputs = kernel / stride;
  up.num_kept_ = num_inputs - 1;
  up.num_left_out_ = trims_left ? kernel - stride : 0;
  const Tensor stored = reader.values(name + ".weight", {in_channels, out_channels, kernel});
  const Tensor bias = reader.values(name + ".bias", {out_channels});
  up.weight_ = Tensor(DType::f32, {stride * out_channels, num_inputs * in_channels});
  up.bias_ = Tensor(DType::f32, {stride * out_channels});
  for (std::int64_t r = 0; r < stride; ++r)
    for (std::int64_t o = 0; o < out_channels; ++o) {
      const std::int64_t row = r * out_channels + o;
      up.bias_.as<float>()[row] = bias.as<float>()[o];
      for (std::int64_t i = 0; i < num_inputs; ++i)
        for (std::int64_t c = 0; c < in_channels; ++c)
          up.weight_.as<float>()[(row * num_inputs + num_inputs - 1 - i) * in_channels + c] =
              stored.as<float>()[(c * out_channels + o) * kernel + r + i * stride];
    }
  up.state_ = layout.add(static_cast<std::size_t>(up.num_kept_ * in_channels));
  return up;
}

Signal StreamingUpsample::forward(const ops::Context& ctx, StreamState& state, const Signal& x) const {
  Signal y(x.length * stride_, out_channels_);
  if (x.length == 0) return y;
  std::vector<float> rows = with_past(state, state_, x);
  const std::int64_t width = weight_.view().shape[1];
  ops::linear(ctx, overlapping_rows(rows, 0, x.length, in_channels_, width),
              as_weight(weight_, 0, stride_ * out_channels_, width), {.bias = bias_.view()},
              make_view(y.values.data(), DType::f32, {x.length, stride_ * out_channels_}));
  std::int64_t& skipped = state.num_skipped[static_cast<std::size_t>(state_)];
  const std::int64_t skip = std::min(num_left_out_ - skipped, y.length);
  if (skip > 0) {
    skipped += skip;
    y.length -= skip;
    y.values.erase(y.values.begin(), y.values.begin() + skip * out_channels_);
  }
  return y;
}

StreamingDepthwise StreamingDepthwise::read(WeightReader& reader, StateLayout& layout, const std::string& name,
                                            std::int64_t channels, int kernel) {
  StreamingDepthwise conv;
  conv.channels_ = channels, conv.kernel_ = kernel;
  const Tensor stored = reader.values(name + ".weight", {channels, 1, kernel});
  conv.weight_ = Tensor(DType::f32, {kernel, channels});
  for (std::int64_t c = 0; c < channels; ++c)
    for (std::int64_t j = 0; j < kernel; ++j)
      conv.weight_.as<float>()[j * channels + c] = stored.as<float>()[c * kernel + j];
  conv.bias_ = reader.values(name + ".bias", {channels});
  conv.state_ = layout.add(static_cast<std::size_t>((kernel - 1) * channels));
  return conv;
}

Signal StreamingDepthwise::forward(const ops::Context& ctx, StreamState& state, const Signal& x) const {
  Signal y(x.length, channels_);
  if (x.length == 0) return y;
  const std::vector<float> rows = with_past(state, state_, x);
  const float *weight = weight_.as<float>(), *bias = bias_.as<float>();
  ctx.threads->parallel_for(x.length, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* out = y.values.data() + t * channels_;
      std::copy_n(bias, channels_, out);
      for (int j = 0; j < kernel_; ++j) {
        const float *in = rows.data() + (t + j) * channels_, *w = weight + j * channels_;
        for (std::int64_t c = 0; c < channels_; ++c) out[c] += w[c] * in[c];
      }
    }
  });
  return y;
}

SnakeBeta SnakeBeta::read(WeightReader& reader, const std::string& name, std::int64_t channels) {
  SnakeBeta snake{.scale = reader.values(name + "alpha", {channels}),
                  .inverse = reader.values(name + "beta", {channels})};
  for (std::int64_t c = 0; c < channels; ++c) {
    snake.scale.as<float>()[c] = std::exp(snake.scale.as<float>()[c]);
    snake.inverse.as<float>()[c] = 1.0F / (std::exp(snake.inverse.as<float>()[c]) + 1e-9F);
  }
  return snake;
}

void SnakeBeta::forward(const ops::Context& ctx, Signal& x) const {
  const float *a = scale.as<float>(), *b = inverse.as<float>();
  ctx.threads->parallel_for(x.length, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* row = x.values.data() + t * x.channels;
      float largest = 0.0F;
      for (std::int64_t c = 0; c < x.channels; ++c) largest = std::max(largest, std::fabs(row[c] * a[c]));
      if (largest < kLargestAngle) {
        for (std::int64_t c = 0; c < x.channels; ++c) row[c] += b[c] * sin_squared(row[c] * a[c]);
      } else {
        for (std::int64_t c = 0; c < x.channels; ++c) {
          const float s = std::sin(row[c] * a[c]);
          row[c] += b[c] * s * s;
        }
      }
    }
  });
}

}  // namespace deltaic

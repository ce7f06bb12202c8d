#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpp/src/core/buffer.h"
#include "cpp/src/models/weight_reader.h"
#include "cpp/src/ops/context.h"

namespace deltaic {

// A piece of a signal: `length` rows of `channels` values, in time order.
struct Signal {
  std::int64_t length = 0, channels = 0;
  std::vector<float> values;

  Signal() = default;
  Signal(std::int64_t rows, std::int64_t columns)
      : length(rows), channels(columns), values(static_cast<std::size_t>(rows * columns)) {}
  TensorView view() { return make_view(values.data(), DType::f32, {length, channels}); }
};

// What one layer keeps of a stream between pieces: the rows that later outputs still need, and how many outputs at the
// start of the stream are left out. A layer asks for its place once, at load, and finds it there in every stream.
struct StreamState {
  std::vector<std::vector<float>> tails;
  std::vector<std::int64_t> num_skipped;
  std::int64_t num_frames = 0;  // that went in
};
class StateLayout {
 public:
  int add(std::size_t num_values) {
    sizes_.push_back(num_values);
    return static_cast<int>(sizes_.size()) - 1;
  }
  // The state before a stream's first frame: zeros.
  StreamState make() const;

 private:
  std::vector<std::size_t> sizes_;
};

// y[t] = sum over j of W[:, :, j] x[t - (kernel - 1 - j) * dilation] + b; inputs before the stream are 0. Gives as many
// rows as it is given. A row's bits do not depend on the pieces that the stream comes in.
class StreamingConv {
 public:
  // NAME.weight [out, in, kernel] and NAME.bias [out].
  static StreamingConv read(WeightReader& reader, StateLayout& layout, const std::string& name,
                            std::int64_t in_channels, std::int64_t out_channels, int kernel, int dilation = 1);
  Signal forward(const ops::Context& ctx, StreamState& state, const Signal& x) const;

 private:
  std::int64_t in_channels_ = 0, out_channels_ = 0;
  int num_groups_ = 1;             // products that are added up: one a tap with dilation, else one for all taps
  std::int64_t group_stride_ = 0;  // rows between them
  std::int64_t num_kept_ = 0;      // rows of the past
  Tensor weight_;                  // [num_groups, out, width of a group] f32
  Tensor bias_;
  int state_ = 0;
};

// Transposed convolution with kernel = m * stride: row t becomes `stride` rows, of the m latest inputs. What is behind
// the last stride is cut; with trims_left so are the first kernel - stride rows of a stream.
class StreamingUpsample {
 public:
  // NAME.weight [in, out, kernel] and NAME.bias [out].
  static StreamingUpsample read(WeightReader& reader, StateLayout& layout, const std::string& name,
                                std::int64_t in_channels, std::int64_t out_channels, int kernel, int stride,
                                bool trims_left);
  Signal forward(const ops::Context& ctx, StreamState& state, const Signal& x) const;

 private:
  std::int64_t in_channels_ = 0, out_channels_ = 0;
  int stride_ = 1;
  std::int64_t num_kept_ = 0;  // rows of the past
  std::int64_t num_left_out_ = 0;
  Tensor weight_;  // [stride * out, m * in] f32, the oldest input first
  Tensor bias_;    // [stride * out]
  int state_ = 0;
};

// Depthwise: y[t, c] = sum over j of w[c, 0, j] x[t - (kernel - 1 - j), c] + b[c].
class StreamingDepthwise {
 public:
  static StreamingDepthwise read(WeightReader& reader, StateLayout& layout, const std::string& name,
                                 std::int64_t channels, int kernel);
  Signal forward(const ops::Context& ctx, StreamState& state, const Signal& x) const;

 private:
  std::int64_t channels_ = 0;
  int kernel_ = 1;
  Tensor weight_;  // [kernel, channels]
  Tensor bias_;
  int state_ = 0;
};

// x[t, c] + sin(x[t, c] * exp(alpha[c]))^2 / (exp(beta[c]) + 1e-9), in place.
struct SnakeBeta {
  Tensor scale, inverse;  // [channels]: exp(alpha), 1 / (exp(beta) + 1e-9)

  static SnakeBeta read(WeightReader& reader, const std::string& name, std::int64_t channels);
  void forward(const ops::Context& ctx, Signal& x) const;
};

}  // namespace deltaic

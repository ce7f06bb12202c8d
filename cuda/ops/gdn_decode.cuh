#pragma once

#include "cpp/src/ops/gated_delta_net.h"

#include "cuda/device/convert.cuh"
#include "cuda/ops/gdn_decode.h"
#include "cuda/ops/gdn_math.cuh"

// What the two decode kernels share: gdn_decode.cu for few sequences, gdn_decode_stream.cu for many.

namespace deltaic::cuda {

// Streams the states through shared memory; gdn_decode chooses.
void gdn_decode_stream(ops::Stream stream, const GdnDecodeArgs& args);

namespace gdn_decode_detail {

constexpr int kDim = 128;                            // key and value head dim
constexpr int kTaps = 4;                             // conv kernel
constexpr int kMaxHeadsPerGroup = 4;                 // value heads a key head
constexpr float kQueryScale = 0.08838834764831845F;  // kDim^-0.5

template <class T, class State>
struct GdnDecodeParams {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  const T* proj;
  std::int64_t proj_stride;
  const float *conv_weight, *A_log, *dt_bias, *norm_weight;
  float eps;
  const std::int32_t* state_indices;
  std::int64_t state_indices_stride;
  const std::uint8_t* has_initial_state;
  T* conv_state;
  std::int64_t conv_slot_stride, conv_channel_stride;
  State* temporal;
  std::int64_t temporal_slot_stride;
  T* out;
};

// One channel of the convolution. Returns the activated value; `window` gets the state to store.
template <class T>
__device__ float convolve(const T* state, bool has_state, float4 weight, T input, T (&window)[kTaps - 1]) {
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) window[i] = has_state ? state[i] : from_float<T>(0.0F);
  const float sum = weight.x * to_float(window[0]) + weight.y * to_float(window[1]) + weight.z * to_float(window[2]) +
                    weight.w * to_float(input);
  window[0] = window[1], window[1] = window[2], window[2] = input;
  return silu(sum);
}

template <class T, class State>
GdnDecodeParams<T, State> make_gdn_decode_params(const GdnDecodeArgs& args) {
  return {.shape = args.shape,
          .layout = args.layout,
          .proj = static_cast<const T*>(args.proj.data),
          .proj_stride = args.proj.stride[0],
          .conv_weight = static_cast<const float*>(args.conv_weight.data),
          .A_log = static_cast<const float*>(args.A_log.data),
          .dt_bias = static_cast<const float*>(args.dt_bias.data),
          .norm_weight = static_cast<const float*>(args.norm_weight.data),
          .eps = args.eps,
          .state_indices = static_cast<const std::int32_t*>(args.state_indices.data),
          .state_indices_stride = args.state_indices.stride[0],
          .has_initial_state = static_cast<const std::uint8_t*>(args.has_initial_state.data),
          .conv_state = static_cast<T*>(args.conv_state.data),
          .conv_slot_stride = args.conv_state.stride[0],
          .conv_channel_stride = args.conv_state.stride[1],
          .temporal = static_cast<State*>(args.temporal.data),
          .temporal_slot_stride = args.temporal.stride[0],
          .out = static_cast<T*>(args.out.data)};
}

}  // namespace gdn_decode_detail
}  // namespace deltaic::cuda

#pragma once

#include "cpp/src/ops/gated_delta_net.h"

#include "cuda/device/convert.cuh"
#include "cuda/ops/gdn_decode.h"
#include "cuda/ops/gdn_math.cuh"

// What the decode kernels share: gdn_decode.cu for few sequences, gdn_decode_stream.cu for many, gdn_verify.cu for
// verified ones.

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

// Four columns of a state row.
__device__ inline float4 load4(const float* address) { return __ldcs(reinterpret_cast<const float4*>(address)); }
__device__ inline float4 load4(const __nv_bfloat16* address) {
  const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(address));
  const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  return {a.x, a.y, b.x, b.y};
}
__device__ inline void store4(float* address, float4 value) { __stcs(reinterpret_cast<float4*>(address), value); }
__device__ inline void store4(__nv_bfloat16* address, float4 value) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(value.x, value.y), b = __floats2bfloat162_rn(value.z, value.w);
  __stcs(reinterpret_cast<uint2*>(address),
         make_uint2(*reinterpret_cast<const unsigned*>(&a), *reinterpret_cast<const unsigned*>(&b)));
}

__device__ inline float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

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

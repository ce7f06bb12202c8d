// The gated delta rule token by token, in f32, for any head sizes (model-spec 9.3).
//   o = e^g (S q) + u (k q): both products of the old state in one pass
//   a warp kRows rows of a head's state, in registers; the next token is loaded while this one is computed
//   bound by the latency of a token, times the tokens of the longest sequence
#include "cpp/src/ops/gated_delta_net.h"

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_math.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kRows = 4;  // a warp
constexpr int kWarps = 4;
constexpr int kMaxKeyHeadDim = 512;

template <class T, class State>
struct Params {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  const T *qkv, *proj;
  std::int64_t qkv_stride, proj_stride;
  const float *A_log, *dt_bias;
  const std::int32_t *start, *state_indices;
  std::int64_t state_indices_stride;
  const std::uint8_t* has_initial_state;
  State* temporal;
  std::int64_t slot_stride, head_stride;
  T* out;
  std::int64_t out_stride;
};

template <int kColumns>
struct Token {
  float q[kColumns], k[kColumns], v[kRows], a, b;
};

template <class T, class State, int kColumns>  // of a lane
__global__ void __launch_bounds__(kWarps * 32) gated_delta_rule_kernel(const __grid_constant__ Params<T, State> p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t seq = blockIdx.z;
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kRows;
  const int dk = p.shape.key_head_dim, dv = p.shape.value_head_dim;
  const std::int64_t slot = p.state_indices[seq * p.state_indices_stride];
  const std::int64_t begin = p.start[seq], end = p.start[seq + 1];
  if (slot < 0 || begin == end || first_row >= dv) return;
  const int ratio = p.shape.num_value_heads / p.shape.num_key_heads, key_head = head / ratio, in_group = head % ratio;
  State* state = p.temporal + slot * p.slot_stride + head * p.head_stride + static_cast<std::int64_t>(first_row) * dk;
  const bool has_state = p.has_initial_state[seq] != 0;
  float s[kRows][kColumns];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      s[r][c] = has_state && column < dk && first_row + r < dv ? to_float(state[r * dk + column]) : 0.0F;
    }

  const float A_log = p.A_log[head], dt_bias = p.dt_bias[head];
  const T* const a = p.proj + p.layout.a + key_head * p.layout.a_group_stride + in_group;
  const T* const b = p.proj + p.layout.b + key_head * p.layout.b_group_stride + in_group;
  const T* const q = p.qkv + key_head * dk;
  const T* const k = q + static_cast<std::int64_t>(p.shape.num_key_heads) * dk;
  const T* const v = p.qkv + 2LL * p.shape.num_key_heads * dk + static_cast<std::int64_t>(head) * dv + first_row;
  const auto load = [&](std::int64_t t) {
    Token<kColumns> token;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      token.q[c] = column < dk ? to_float(q[t * p.qkv_stride + column]) : 0.0F;
      token.k[c] = column < dk ? to_float(k[t * p.qkv_stride + column]) : 0.0F;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) token.v[r] = first_row + r < dv ? to_float(v[t * p.qkv_stride + r]) : 0.0F;
    token.a = to_float(a[t * p.proj_stride]), token.b = to_float(b[t * p.proj_stride]);
    return token;
  };
  const float scale = 1.0F / sqrtf(static_cast<float>(dk));
  Token<kColumns> next = load(begin);
  for (std::int64_t t = begin; t < end; ++t) {
    Token<kColumns> token = next;
    if (t + 1 < end) next = load(t + 1);
    float qq = 0.0F, kk = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) qq += token.q[c] * token.q[c], kk += token.k[c] * token.k[c];
    const float q_scale = scale / sqrtf(warp_sum(qq) + 1e-6F), k_scale = 1.0F / sqrtf(warp_sum(kk) + 1e-6F);
    float kq = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) token.q[c] *= q_scale, token.k[c] *= k_scale, kq += token.q[c] * token.k[c];
    kq = warp_sum(kq);
    const float decay = expf(log_decay(token.a, A_log, dt_bias)), beta = sigmoid(token.b);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sk = 0.0F, sq = 0.0F;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sk += s[r][c] * token.k[c], sq += s[r][c] * token.q[c];
      const float u = beta * (token.v[r] - decay * warp_sum(sk));
      const float o = decay * warp_sum(sq) + u * kq;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s[r][c] = decay * s[r][c] + u * token.k[c];
      if (lane == r && first_row + r < dv)
        p.out[t * p.out_stride + static_cast<std::int64_t>(head) * dv + first_row + r] = from_float<T>(o);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      if (column < dk && first_row + r < dv) state[r * dk + column] = from_float<State>(s[r][c]);
    }
}

}  // namespace

void gated_delta_rule(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView, TensorView out) {
  DELTAIC_CHECK(shape.key_head_dim <= kMaxKeyHeadDim, "gated_delta_rule: key_head_dim is ", shape.key_head_dim,
                ", the most is ", kMaxKeyHeadDim);
  constexpr int kBlockRows = kWarps * kRows;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((shape.value_head_dim + kBlockRows - 1) / kBlockRows),
                                            static_cast<unsigned>(shape.num_value_heads),
                                            static_cast<unsigned>(sequences.state_indices.shape[0])),
                               .block = dim3(kWarps * 32),
                               .stream = native(stream)};
  visit_float(qkv.dtype, [&]<class T>(T) {
    visit_float(temporal.dtype, [&]<class State>(State) {
      const Params<T, State> params{
          .shape = shape,
          .layout = layout,
          .qkv = static_cast<const T*>(qkv.data),
          .proj = static_cast<const T*>(proj.data),
          .qkv_stride = qkv.stride[0],
          .proj_stride = proj.stride[0],
          .A_log = static_cast<const float*>(A_log.data),
          .dt_bias = static_cast<const float*>(dt_bias.data),
          .start = static_cast<const std::int32_t*>(sequences.query_start_loc.data),
          .state_indices = static_cast<const std::int32_t*>(sequences.state_indices.data),
          .state_indices_stride = sequences.state_indices.stride[0],
          .has_initial_state = static_cast<const std::uint8_t*>(sequences.has_initial_state.data),
          .temporal = static_cast<State*>(temporal.data),
          .slot_stride = temporal.stride[0],
          .head_stride = temporal.stride[1],
          .out = static_cast<T*>(out.data),
          .out_stride = out.stride[0]};
      if (shape.key_head_dim <= 32)
        launch(gated_delta_rule_kernel<T, State, 1>, params);
      else if (shape.key_head_dim <= 64)
        launch(gated_delta_rule_kernel<T, State, 2>, params);
      else if (shape.key_head_dim <= 128)
        launch(gated_delta_rule_kernel<T, State, 4>, params);
      else
        launch(gated_delta_rule_kernel<T, State, kMaxKeyHeadDim / 32>, params);
    });
  });
}

}  // namespace deltaic::cuda

// The gated delta rule token by token, in f32, for any head sizes (docs/models.md, "Gated delta rule").
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
  const std::int32_t *num_accepted, *snapshot_slots, *snapshot_offsets;  // null: no drafts, no snapshots
  State* temporal;
  std::int64_t slot_stride, head_stride;
  float* replay;
  std::int64_t replay_stride;
  int replay_size, replay_update, replay_decay;  // of GdnShape
  T* out;
  std::int64_t out_stride;
};

__device__ float inverse_norm(float sum_of_squares) { return 1.0F / sqrtf(sum_of_squares + 1e-6F); }
// An element of S := decay * S + u k^T; a replayed token takes the same roundings.
__device__ float advance(float s, float decay, float u, float k) { return __fmaf_rn(u, k, __fmul_rn(decay, s)); }
// What a state of this type would give back.
template <class State>
__device__ float rounded(float value) {
  return to_float(from_float<State>(value));
}

template <int kColumns>
struct Token {
  float q[kColumns], k[kColumns], v[kRows], a, b;
};

// kColumns of a lane. kHasDrafts: verified sequences may be among the others; they leave their updates in their rows,
// of which store_rows_kernel writes the rest when nobody reads them.
template <class T, class State, int kColumns, bool kHasDrafts>
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
  const auto initial = static_cast<ops::InitialState>(p.has_initial_state[seq]);
  const bool has_state = initial != ops::InitialState::zero;
  float s[kRows][kColumns];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = c * 32 + lane;
      s[r][c] = has_state && column < dk && first_row + r < dv ? to_float(state[r * dk + column]) : 0.0F;
    }
  const auto store = [&](State* to) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * 32 + lane;
        if (column < dk && first_row + r < dv) to[r * dk + column] = from_float<State>(s[r][c]);
      }
  };
  const bool is_verified = kHasDrafts && p.num_accepted[seq] != 0;
  float* const updates =
      kHasDrafts ? p.replay + slot * p.replay_stride + p.replay_update + head * dv + first_row : nullptr;
  std::int64_t snapshot_token = -1, snapshot_slot = -1;
  if (is_verified) {
    const float* row = p.replay + slot * p.replay_stride;
    const int num_replayed = initial == ops::InitialState::replay ? p.num_accepted[seq] : 0;
    for (int i = 0; i < num_replayed; ++i, row += p.replay_size) {
      const float decay = row[p.replay_decay + head];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * 32 + lane;
        const float k = column < dk ? row[key_head * dk + column] : 0.0F;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float u = first_row + r < dv ? row[p.replay_update + head * dv + first_row + r] : 0.0F;
          s[r][c] = rounded<State>(advance(s[r][c], decay, u, k));
        }
      }
    }
    if (num_replayed > 0 || !has_state) store(state);
    if (p.snapshot_slots != nullptr && p.snapshot_slots[seq] >= 0) {
      snapshot_slot = p.snapshot_slots[seq];
      snapshot_token = p.snapshot_offsets[seq] < 0 ? -1 : begin + p.snapshot_offsets[seq];
    }
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
    const float q_scale = scale / sqrtf(warp_sum(qq) + 1e-6F), k_scale = inverse_norm(warp_sum(kk));
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
      for (int c = 0; c < kColumns; ++c) s[r][c] = advance(s[r][c], decay, u, token.k[c]);
      if (lane == r && first_row + r < dv) {
        p.out[t * p.out_stride + static_cast<std::int64_t>(head) * dv + first_row + r] = from_float<T>(o);
        if (is_verified) updates[(t - begin) * p.replay_size + r] = u;
      }
    }
    if (is_verified) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) s[r][c] = rounded<State>(s[r][c]);
      if (t == snapshot_token) store(state + (snapshot_slot - slot) * p.slot_stride);
    }
  }
  if (!is_verified) store(state);
}

// k of the key heads and decay of the value heads, of the tokens of verified sequences: a warp a key head.
template <class T, class State, int kColumns>
__global__ void __launch_bounds__(32) store_rows_kernel(const __grid_constant__ Params<T, State> p) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t seq = blockIdx.y, slot = p.state_indices[seq * p.state_indices_stride];
  if (slot < 0 || p.num_accepted[seq] == 0) return;
  const int key_head = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const int dk = p.shape.key_head_dim, ratio = p.shape.num_value_heads / p.shape.num_key_heads;
  float* row = p.replay + slot * p.replay_stride;
  for (std::int64_t t = p.start[seq]; t < p.start[seq + 1]; ++t, row += p.replay_size) {
    const T* from = p.qkv + t * p.qkv_stride + static_cast<std::int64_t>(p.shape.num_key_heads + key_head) * dk;
    float k[kColumns], kk = 0.0F;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) k[c] = c * 32 + lane < dk ? to_float(from[c * 32 + lane]) : 0.0F;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) kk += k[c] * k[c];
    const float scale = inverse_norm(warp_sum(kk));
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c * 32 + lane < dk) row[key_head * dk + c * 32 + lane] = k[c] * scale;
    for (int j = lane; j < ratio; j += 32) {
      const int head = key_head * ratio + j;
      const float a = to_float(p.proj[t * p.proj_stride + p.layout.a + key_head * p.layout.a_group_stride + j]);
      row[p.replay_decay + head] = expf(log_decay(a, p.A_log[head], p.dt_bias[head]));
    }
  }
}

}  // namespace

void gated_delta_rule(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView replay, TensorView out) {
  DELTAIC_CHECK(shape.key_head_dim <= kMaxKeyHeadDim, "gated_delta_rule: key_head_dim is ", shape.key_head_dim,
                ", the most is ", kMaxKeyHeadDim);
  constexpr int kBlockRows = kWarps * kRows;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((shape.value_head_dim + kBlockRows - 1) / kBlockRows),
                                            static_cast<unsigned>(shape.num_value_heads),
                                            static_cast<unsigned>(sequences.state_indices.shape[0])),
                               .block = dim3(kWarps * 32),
                               .stream = native(stream)};
  const DependentLaunch store_rows{
      .grid = dim3(static_cast<unsigned>(shape.num_key_heads), static_cast<unsigned>(sequences.state_indices.shape[0])),
      .block = dim3(32),
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
          .num_accepted = static_cast<const std::int32_t*>(sequences.num_accepted.data),
          .snapshot_slots = static_cast<const std::int32_t*>(sequences.snapshot_slots.data),
          .snapshot_offsets = static_cast<const std::int32_t*>(sequences.snapshot_offsets.data),
          .temporal = static_cast<State*>(temporal.data),
          .slot_stride = temporal.stride[0],
          .head_stride = temporal.stride[1],
          .replay = static_cast<float*>(replay.data),
          .replay_stride = replay.stride[0],
          .replay_size = shape.replay_size(),
          .replay_update = shape.replay_update(),
          .replay_decay = shape.replay_decay(),
          .out = static_cast<T*>(out.data),
          .out_stride = out.stride[0]};
      const auto run = [&]<int kColumns>() {
        if (!sequences.has_drafts()) return launch(gated_delta_rule_kernel<T, State, kColumns, false>, params);
        launch(gated_delta_rule_kernel<T, State, kColumns, true>, params);
        store_rows(store_rows_kernel<T, State, kColumns>, params);
      };
      if (shape.key_head_dim <= 32)
        run.template operator()<1>();
      else if (shape.key_head_dim <= 64)
        run.template operator()<2>();
      else if (shape.key_head_dim <= 128)
        run.template operator()<4>();
      else
        run.template operator()<kMaxKeyHeadDim / 32>();
    });
  });
}

}  // namespace deltaic::cuda

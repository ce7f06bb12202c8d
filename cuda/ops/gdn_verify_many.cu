// A verified step of a Gated DeltaNet layer for many sequences, in two kernels.
//   prepare_kernel, a block a (sequence, key head): convolution, l2 norms, gates; what the heads need goes to the
//   workspace, also k and decay of the last step's rows, which it overwrites with those of this step
//   verify_kernel, a block a (sequence, value head): its state is loaded while the other kernel runs, 8 lanes a row,
//   and stays in registers: the tokens that the last step accepted are repeated, the state is written back, and the
//   tokens of this step go on from it; they write no states, but their updates
//   bound by memory: 2 x num_value_heads x 128 x 128 x sizeof(state) bytes a sequence, and the rows
#include "cpp/src/check.h"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_verify.cuh"

namespace deltaic::cuda {
namespace {

using namespace gdn_verify_detail;

constexpr int kPasses = kDim / kPassRows;
constexpr int kVectors = kDim / 4;  // float4 of a head's row

// Of a (sequence, key head), and of a (sequence, value head).
struct alignas(16) KeyInputs {
  float old_k[kMaxTokens][kDim], q[kMaxTokens][kDim], k[kMaxTokens][kDim];
};
struct alignas(16) ValueInputs {
  float v[kMaxTokens][kDim];
  float gate[kMaxTokens][kDim];  // norm_weight * silu(z)
  float old_decay[kMaxTokens], decay[kMaxTokens], beta[kMaxTokens];
};

template <class T, class State>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ VerifyParams<T, State> params,
                                                           KeyInputs* key_inputs, ValueInputs* value_inputs) {
  __shared__ float norms[2][kMaxTokens][kVectors / 8];  // a warp's sum of squares
  const auto& p = params.layer;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const int key_head = static_cast<int>(blockIdx.x), first_head = key_head * heads_per_group;
  const std::int64_t seq = blockIdx.y;
  const Sequence sequence(params, seq);
  const int num_tokens = sequence.num_tokens;
  if (sequence.is_padding()) {
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int t = 0; t < num_tokens; ++t) {
      T* out = p.out + ((sequence.begin + t) * p.shape.num_value_heads + first_head) * kDim;
      for (int i = thread; i < heads_per_group * kDim; i += kThreads) out[i] = from_float<T>(0.0F);
    }
    return;
  }
  KeyInputs& keys = key_inputs[seq * p.shape.num_key_heads + key_head];
  ValueInputs* const values = value_inputs + seq * p.shape.num_value_heads + first_head;
  float* const rows = params.replay + sequence.slot * params.replay_stride;

  // Thread c < 128: channel c of q; 128 <= c < 256: of k. Then of the values of all heads, channel after channel.
  const int c = thread % kDim;
  const bool is_key = thread >= kDim;
  const auto state_of = [&](std::int64_t channel) {
    return p.conv_state + sequence.slot * p.conv_slot_stride + channel * p.conv_channel_stride;
  };
  const auto weight_of = [&](std::int64_t channel) {
    return *reinterpret_cast<const float4*>(p.conv_weight + channel * kTaps);
  };
  const std::int64_t channel =
      (is_key ? p.shape.num_key_heads * kDim : 0) + static_cast<std::int64_t>(key_head) * kDim + c;
  Channel<T> qk;
  qk.load_state(state_of(channel), sequence);
  const float4 weight = weight_of(channel);
  float4 old_k{};
  float old_decay = 0.0F;
  const int old_token = thread / heads_per_group, head_of_gates = thread % heads_per_group;
  if (thread < sequence.num_replayed * kVectors)
    old_k = *reinterpret_cast<const float4*>(rows + thread / kVectors * params.replay_size + key_head * kDim +
                                             thread % kVectors * 4);
  if (old_token < sequence.num_replayed)
    old_decay = rows[old_token * params.replay_size + params.replay_decay + first_head + head_of_gates];

  wait_for_previous_kernel();
  allow_next_kernel();
  const T* const proj = p.proj + sequence.begin * p.proj_stride;
  qk.load(proj + (is_key ? p.layout.k + key_head * p.layout.k_stride : p.layout.q + key_head * p.layout.q_stride) + c,
          p.proj_stride, num_tokens);
  if (thread < sequence.num_replayed * kVectors) reinterpret_cast<float4*>(keys.old_k)[thread] = old_k;
  if (old_token < sequence.num_replayed) values[head_of_gates].old_decay[old_token] = old_decay;
  float unit[kMaxTokens];
#pragma unroll
  for (int t = 0; t < kMaxTokens; ++t) {
    if (t >= num_tokens) break;
    unit[t] = qk.activated(weight, t);
    const float square = warp_sum(unit[t] * unit[t]);
    if (lane == 0) norms[is_key][t][warp % 4] = square;
  }
  for (int i = thread; i < heads_per_group * kDim; i += kThreads) {
    const std::int64_t v_channel = (2LL * p.shape.num_key_heads + first_head) * kDim + i;
    Channel<T> v;
    v.load_state(state_of(v_channel), sequence);
    v.load(proj + p.layout.v + key_head * p.layout.v_group_stride + i, p.proj_stride, num_tokens);
    const T* const z = proj + p.layout.z + key_head * p.layout.z_group_stride + i;
    const float4 v_weight = weight_of(v_channel);
    const float norm_weight = p.norm_weight[i % kDim];
    ValueInputs& to = values[i / kDim];
#pragma unroll
    for (int t = 0; t < kMaxTokens; ++t) {
      if (t >= num_tokens) break;
      to.v[t][i % kDim] = v.activated(v_weight, t);
      to.gate[t][i % kDim] = norm_weight * silu(to_float(z[t * p.proj_stride]));
    }
    v.store(state_of(v_channel), p.conv_slot_stride, sequence);
  }
  __syncthreads();  // norms are there; all old rows were read

#pragma unroll
  for (int t = 0; t < kMaxTokens; ++t) {
    if (t >= num_tokens) break;
    const float* const sums = norms[is_key][t];
    const float scale = rsqrtf(sums[0] + sums[1] + sums[2] + sums[3] + 1e-6F) * (is_key ? 1.0F : kQueryScale);
    (is_key ? keys.k : keys.q)[t][c] = unit[t] * scale;
    if (is_key) rows[t * params.replay_size + key_head * kDim + c] = unit[t] * scale;
  }
  qk.store(state_of(channel), p.conv_slot_stride, sequence);
  if (const int t = old_token; t < num_tokens) {
    const T* const row = proj + t * p.proj_stride;
    const int head = first_head + head_of_gates;
    const float a = to_float(row[p.layout.a + key_head * p.layout.a_group_stride + head_of_gates]);
    const float b = to_float(row[p.layout.b + key_head * p.layout.b_group_stride + head_of_gates]);
    const float decay = expf(log_decay(a, p.A_log[head], p.dt_bias[head]));
    values[head_of_gates].decay[t] = decay, values[head_of_gates].beta[t] = sigmoid(b);
    rows[t * params.replay_size + params.replay_decay + head] = decay;
  }
}

// num_rows rows of floats into shared memory.
__device__ inline void copy_rows(float (*to)[kDim], const float (*from)[kDim], int num_rows) {
  for (int i = static_cast<int>(threadIdx.x); i < num_rows * kVectors; i += kThreads)
    reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
}

template <class T, class State>
__global__ void __launch_bounds__(kThreads, 2) verify_kernel(const __grid_constant__ VerifyParams<T, State> params,
                                                             KeyInputs* key_inputs, ValueInputs* value_inputs) {
  __shared__ KeyInputs keys;
  __shared__ ValueInputs values;
  __shared__ float updates[kMaxTokens][kDim], o[kMaxTokens][kDim];  // updates: of the last step, then of this one
  __shared__ float squares[kMaxTokens][kDim / 32];
  const auto& p = params.layer;
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.x), key_head = head / (p.shape.num_value_heads / p.shape.num_key_heads);
  const std::int64_t seq = blockIdx.y;
  const Sequence sequence(params, seq);
  if (sequence.is_padding()) {
    wait_for_previous_kernel();
    allow_next_kernel();
    return;
  }
  const int num_tokens = sequence.num_tokens, num_replayed = sequence.num_replayed;

  // Row kPassRows * i + first_row of the state in s[i].
  const int first_row = thread / kRowLanes, column = thread % kRowLanes * 4;
  State* const state = p.temporal + sequence.slot * p.temporal_slot_stride +
                       (static_cast<std::int64_t>(head) * kDim + first_row) * kDim + column;
  float4 s[kPasses][kPieces];
#pragma unroll
  for (int i = 0; i < kPasses; ++i)
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      s[i][j] =
          sequence.has_state ? load4(state + i * kPassRows * kDim + j * 4 * kRowLanes) : float4{0.0F, 0.0F, 0.0F, 0.0F};
  float* const rows = params.replay + sequence.slot * params.replay_stride + params.replay_update + head * kDim;
  for (int i = thread; i < num_replayed * kDim; i += kThreads)
    updates[i / kDim][i % kDim] = rows[i / kDim * params.replay_size + i % kDim];

  wait_for_previous_kernel();
  allow_next_kernel();
  const KeyInputs& from_keys = key_inputs[seq * p.shape.num_key_heads + key_head];
  const ValueInputs& from_values = value_inputs[seq * p.shape.num_value_heads + head];
  copy_rows(keys.old_k, from_keys.old_k, num_replayed);
  copy_rows(keys.q, from_keys.q, num_tokens);
  copy_rows(keys.k, from_keys.k, num_tokens);
  copy_rows(values.v, from_values.v, num_tokens);
  copy_rows(values.gate, from_values.gate, num_tokens);
  if (thread < kMaxTokens) {
    values.old_decay[thread] = from_values.old_decay[thread];
    values.decay[thread] = from_values.decay[thread], values.beta[thread] = from_values.beta[thread];
  }
  __syncthreads();

  // S := decays S + sum of (update times the decays behind it) k^T.
  const auto store_state = [&](State* to) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) store4(to + i * kPassRows * kDim + j * 4 * kRowLanes, s[i][j]);
  };
  if (num_replayed > 0) {
    float decays = 1.0F;
    for (int t = 0; t < num_replayed; ++t) decays *= values.old_decay[t];
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        s[i][j] = {decays * s[i][j].x, decays * s[i][j].y, decays * s[i][j].z, decays * s[i][j].w};
    float behind = 1.0F;
    for (int t = num_replayed - 1; t >= 0; --t) {
      float update[kPasses];
#pragma unroll
      for (int i = 0; i < kPasses; ++i) update[i] = behind * updates[t][i * kPassRows + first_row];
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const float4 k = *reinterpret_cast<const float4*>(&keys.old_k[t][j * 4 * kRowLanes + column]);
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
          s[i][j] = {s[i][j].x + update[i] * k.x, s[i][j].y + update[i] * k.y, s[i][j].z + update[i] * k.z,
                     s[i][j].w + update[i] * k.w};
      }
      behind *= values.old_decay[t];
    }
  }
  if (num_replayed > 0 || !sequence.has_state) store_state(state);
  __syncthreads();  // the old updates were read

  for (int t = 0; t < num_tokens; ++t) {
    const float decay = values.decay[t], beta = values.beta[t];
    float update[kPasses] = {}, products[kPasses] = {};
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const float4 k = *reinterpret_cast<const float4*>(&keys.k[t][j * 4 * kRowLanes + column]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) update[i] += dot4(s[i][j], k);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      update[i] = beta * (values.v[t][i * kPassRows + first_row] - decay * row_sum(update[i]));
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const float4 k = *reinterpret_cast<const float4*>(&keys.k[t][j * 4 * kRowLanes + column]);
      const float4 q = *reinterpret_cast<const float4*>(&keys.q[t][j * 4 * kRowLanes + column]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        s[i][j] = {decay * s[i][j].x + update[i] * k.x, decay * s[i][j].y + update[i] * k.y,
                   decay * s[i][j].z + update[i] * k.z, decay * s[i][j].w + update[i] * k.w};
        products[i] += dot4(s[i][j], q);
      }
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const float value = row_sum(products[i]);
      if (thread % kRowLanes != 0) continue;
      o[t][i * kPassRows + first_row] = value;
      updates[t][i * kPassRows + first_row] = update[i];
    }
    if (t == sequence.snapshot_offset)
      store_state(state + (sequence.snapshot_slot - sequence.slot) * p.temporal_slot_stride);
  }
  __syncthreads();

  // The gated norm, two tokens at a time.
  const int row = thread % kDim;
  for (int t = thread / kDim; t < num_tokens; t += kThreads / kDim) {
    const float partial = warp_sum(o[t][row] * o[t][row]);
    if (thread % 32 == 0) squares[t][row / 32] = partial;
    rows[t * params.replay_size + row] = updates[t][row];
  }
  __syncthreads();
  for (int t = thread / kDim; t < num_tokens; t += kThreads / kDim) {
    const float total = squares[t][0] + squares[t][1] + squares[t][2] + squares[t][3];
    p.out[((sequence.begin + t) * p.shape.num_value_heads + head) * kDim + row] =
        from_float<T>(o[t][row] * rsqrtf(total / kDim + p.eps) * values.gate[t][row]);
  }
}

template <class T, class State>
void launch_verify(ops::Stream stream, const GdnVerifyArgs& args) {
  const ops::GdnShape& shape = args.layer.shape;
  const std::int64_t num_seqs = args.num_accepted.shape[0];
  const auto params = make_verify_params<T, State>(args);
  auto* const keys = static_cast<KeyInputs*>(args.layer.workspace.data);
  auto* const values = reinterpret_cast<ValueInputs*>(keys + num_seqs * shape.num_key_heads);
  const auto launch = [&](int num_heads, auto kernel) {
    const DependentLaunch to{.grid = dim3(static_cast<unsigned>(num_heads), static_cast<unsigned>(num_seqs)),
                             .block = dim3(kThreads),
                             .stream = native(stream)};
    to(kernel, params, keys, values);
  };
  launch(shape.num_key_heads, prepare_kernel<T, State>);
  launch(shape.num_value_heads, verify_kernel<T, State>);
}

}  // namespace

std::size_t gdn_verify_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_seqs) {
  return static_cast<std::size_t>(num_seqs) * (static_cast<std::size_t>(shape.num_key_heads) * sizeof(KeyInputs) +
                                               static_cast<std::size_t>(shape.num_value_heads) * sizeof(ValueInputs));
}

void gdn_verify_many(ops::Stream stream, const GdnVerifyArgs& args) {
  const std::size_t num_bytes = gdn_verify_workspace_bytes(args.layer.shape, args.num_accepted.shape[0]);
  DELTAIC_CHECK(args.layer.workspace.num_bytes() >= num_bytes, "gdn_verify: the workspace has ",
                args.layer.workspace.num_bytes(), " bytes, ", num_bytes, " are needed");
  visit_float(args.layer.proj.dtype, [&]<class T>(T) {
    args.layer.temporal.dtype == DType::f32 ? launch_verify<T, float>(stream, args)
                                            : launch_verify<T, __nv_bfloat16>(stream, args);
  });
}

}  // namespace deltaic::cuda

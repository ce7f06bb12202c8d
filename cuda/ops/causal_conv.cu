// Depthwise causal convolution over packed sequences, then SiLU, and the conv state (docs/models.md,
// "Causal convolution").
//   a block: a tile of kTile tokens of one sequence x kThreads vectors of channels; a thread slides over its tokens
//   with the last inputs in registers; the thread that reads a conv state also writes it: no two blocks meet there
//   bound by memory: reads and writes a row of conv_dim channels a token
#include "cpp/src/ops/gated_delta_net.h"

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_math.cuh"

namespace deltaic::cuda {
namespace {

constexpr int kTile = 32;  // tokens
constexpr int kGroup = 8;  // of them, whose loads are in flight together, while those before are computed
constexpr int kThreads = 256;

template <class T>
struct Params {
  ops::GdnShape shape;
  ops::GdnProjectionLayout layout;
  int conv_dim;
  const T* proj;
  std::int64_t proj_stride;
  const float* weight;
  const std::int32_t* start;
  int num_seqs;
  const std::int32_t* state_indices;
  std::int64_t state_indices_stride;
  const std::uint8_t* has_initial_state;
  const std::int32_t *num_accepted, *snapshot_slots, *snapshot_offsets;  // null: no drafts, no snapshots
  std::int64_t slot_stride, channel_stride;
  T* out;
  std::int64_t out_stride;
};

// Where channel `channel` of the plain order lies in a row of proj.
__device__ std::int64_t column_of(const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout, int channel) {
  const int key_dim = shape.num_key_heads * shape.key_head_dim;
  if (channel < 2 * key_dim) {
    const bool is_key = channel >= key_dim;
    const int c = is_key ? channel - key_dim : channel;
    return (is_key ? layout.k : layout.q) + c / shape.key_head_dim * (is_key ? layout.k_stride : layout.q_stride) +
           c % shape.key_head_dim;
  }
  const int c = channel - 2 * key_dim, group = shape.num_value_heads / shape.num_key_heads * shape.value_head_dim;
  return layout.v + c / group * layout.v_group_stride + c % group;
}

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T values[kVector];
};

// Four taps in order; the kernels below take the same roundings.
__device__ float taps_of(const float* weight, float x0, float x1, float x2, float x3) {
  return fmaf(weight[3], x3, fmaf(weight[2], x2, fmaf(weight[1], x1, weight[0] * x0)));
}

// kTaps 0: any number of taps, with one channel a thread.
template <class T, class State, int kVector, int kTaps>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    causal_conv_kernel(const __grid_constant__ Params<T> p, State* conv_state) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Piece tile = find_piece<kTile>(p.start, p.num_seqs, blockIdx.x);
  const int channel = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
  if (tile.seq < 0 || channel >= p.conv_dim) return;
  const std::int64_t slot = p.state_indices[tile.seq * p.state_indices_stride];
  if (slot < 0 || (p.num_accepted != nullptr && p.num_accepted[tile.seq] != 0)) return;
  const bool has_state = p.has_initial_state[tile.seq] != 0;
  const bool is_first = tile.begin == tile.seq_begin;
  const std::int64_t end = tile.begin + kTile < tile.seq_end ? tile.begin + kTile : tile.seq_end;
  const T* input = p.proj + column_of(p.shape, p.layout, channel);
  T* out = p.out + channel;
  State* state = conv_state + slot * p.slot_stride + channel * p.channel_stride;

  if constexpr (kTaps == 0) {
    const int tail = p.shape.conv_kernel - 1;
    const auto input_at = [&](std::int64_t t) {
      if (t >= tile.seq_begin) return to_float(input[t * p.proj_stride]);
      return has_state ? to_float(state[t - tile.seq_begin + tail]) : 0.0F;
    };
    for (std::int64_t t = tile.begin; t < end; ++t) {
      float sum = 0.0F;
      for (int j = 0; j <= tail; ++j)
        sum += p.weight[static_cast<std::int64_t>(channel) * (tail + 1) + j] * input_at(t - tail + j);
      out[t * p.out_stride] = from_float<T>(sum / (1.0F + expf(-sum)));
    }
    // From the oldest on: what is read lies at or after what is written.
    if (is_first)
      for (int j = 0; j < tail; ++j) state[j] = from_float<State>(input_at(tile.seq_end - tail + j));
  } else {
    constexpr int kTail = kTaps - 1;
    using Inputs = Vector<T, kVector>;
    Inputs in[2][kGroup];
    const int num_tokens = static_cast<int>(end - tile.begin);
    const T* first_input = input + tile.begin * p.proj_stride;
    T* next_out = out + tile.begin * p.out_stride;
    // Past the end the last token again, so that no load depends on a branch.
    const auto load_group = [&](int group, Inputs(&inputs)[kGroup]) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        inputs[i] =
            *reinterpret_cast<const Inputs*>(first_input + min(group * kGroup + i, num_tokens - 1) * p.proj_stride);
    };
    load_group(0, in[0]);
    float weight[kVector][kTaps], window[kTail][kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float4 taps = *reinterpret_cast<const float4*>(p.weight + static_cast<std::int64_t>(channel + c) * kTaps);
      weight[c][0] = taps.x, weight[c][1] = taps.y, weight[c][2] = taps.z, weight[c][3] = taps.w;
    }
    Inputs before[kTail];
#pragma unroll
    for (int j = 0; j < kTail; ++j)
      before[j] = *reinterpret_cast<const Inputs*>(input + max(tile.begin - kTail + j, tile.seq_begin) * p.proj_stride);
#pragma unroll
    for (int j = 0; j < kTail; ++j)
#pragma unroll
      for (int c = 0; c < kVector; ++c) window[j][c] = to_float(before[j].values[c]);
    if (is_first)
#pragma unroll
      for (int j = 0; j < kTail; ++j)
#pragma unroll
        for (int c = 0; c < kVector; ++c) window[j][c] = has_state ? to_float(state[c * p.channel_stride + j]) : 0.0F;
    if (is_first)
#pragma unroll
      for (int j = 0; j < kTail; ++j) {
        const std::int64_t t = tile.seq_end - kTail + j, back = tile.seq_begin - t;  // back > 0: of the old state
        Inputs last{};
        if (back <= 0) last = *reinterpret_cast<const Inputs*>(input + t * p.proj_stride);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          const float value = back <= 0 ? to_float(last.values[c]) : back == 1 ? window[2][c] : window[1][c];
          state[c * p.channel_stride + j] = from_float<State>(value);
        }
      }
#pragma unroll
    for (int group = 0; group < kTile / kGroup; ++group) {
      if (group * kGroup >= num_tokens) break;
      if (group + 1 < kTile / kGroup) load_group(group + 1, in[(group + 1) % 2]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i, next_out += p.out_stride) {
        Inputs result;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          const float x = to_float(in[group % 2][i].values[c]);
          const float sum = taps_of(weight[c], window[0][c], window[1][c], window[2][c], x);
          window[0][c] = window[1][c], window[1][c] = window[2][c], window[2][c] = x;
          result.values[c] = from_float<T>(silu(sum));
        }
        if (group * kGroup + i < num_tokens) *reinterpret_cast<Inputs*>(next_out) = result;
      }
    }
  }
}

// A verified sequence: a thread a channel, straight from memory. kIsFast: as the other kernel's vectors, else as its
// single channels.
template <class T, class State, bool kIsFast>
__global__ void __launch_bounds__(kThreads)
    verified_conv_kernel(const __grid_constant__ Params<T> p, State* conv_state) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t seq = blockIdx.x, slot = p.state_indices[seq * p.state_indices_stride];
  const int channel = static_cast<int>(blockIdx.y * kThreads + threadIdx.x), num_accepted = p.num_accepted[seq];
  const int begin = p.start[seq], num_tokens = p.start[seq + 1] - begin;
  if (slot < 0 || num_accepted == 0 || num_tokens == 0 || channel >= p.conv_dim) return;
  const auto initial = static_cast<ops::InitialState>(p.has_initial_state[seq]);
  const int first = initial == ops::InitialState::replay ? num_accepted - 1 : 0, tail = p.shape.conv_kernel - 1;
  const T* input = p.proj + begin * p.proj_stride + column_of(p.shape, p.layout, channel);
  State* state = conv_state + slot * p.slot_stride + channel * p.channel_stride;
  // Of token t of this step, or before it, as a state keeps it.
  const auto input_at = [&](int t) {
    if (t >= 0) return from_float<State>(to_float(input[t * p.proj_stride]));
    return initial == ops::InitialState::zero ? from_float<State>(0.0F) : state[first + tail + t];
  };
  const float* weight = p.weight + static_cast<std::int64_t>(channel) * (tail + 1);
  for (int t = 0; t < num_tokens; ++t) {
    float sum = 0.0F;
    if constexpr (kIsFast) {
      sum = taps_of(weight, to_float(input_at(t - 3)), to_float(input_at(t - 2)), to_float(input_at(t - 1)),
                    to_float(input[t * p.proj_stride]));
    } else {
      for (int j = 0; j <= tail; ++j)
        sum += weight[j] * (j == tail ? to_float(input[t * p.proj_stride]) : to_float(input_at(t - tail + j)));
    }
    p.out[(begin + t) * p.out_stride + channel] = from_float<T>(kIsFast ? silu(sum) : sum / (1.0F + expf(-sum)));
  }
  if (p.snapshot_slots != nullptr && p.snapshot_slots[seq] >= 0) {
    const int offset = p.snapshot_offsets[seq];
    State* snapshot = conv_state + p.snapshot_slots[seq] * p.slot_stride + channel * p.channel_stride;
    if (0 <= offset && offset < num_tokens)
      for (int j = 0; j < tail; ++j) snapshot[j] = input_at(offset + 1 - tail + j);
  }
  // From the oldest on: what is read lies behind what is written.
  for (int j = 0; j < tail - 1 + num_tokens; ++j) state[j] = input_at(1 - tail + j);
}

bool is_multiple(std::int64_t divisor, std::initializer_list<std::int64_t> values) {
  for (const std::int64_t value : values)
    if (value % divisor != 0) return false;
  return true;
}

}  // namespace

void causal_conv(ops::Stream stream, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out) {
  const int num_seqs = static_cast<int>(sequences.state_indices.shape[0]);
  const auto num_tiles = static_cast<unsigned>(num_pieces<kTile>(proj.shape[0], num_seqs));
  visit_float(proj.dtype, [&]<class T>(T) {
    const Params<T> params{.shape = shape,
                           .layout = layout,
                           .conv_dim = shape.conv_dim(),
                           .proj = static_cast<const T*>(proj.data),
                           .proj_stride = proj.stride[0],
                           .weight = static_cast<const float*>(weight.data),
                           .start = static_cast<const std::int32_t*>(sequences.query_start_loc.data),
                           .num_seqs = num_seqs,
                           .state_indices = static_cast<const std::int32_t*>(sequences.state_indices.data),
                           .state_indices_stride = sequences.state_indices.stride[0],
                           .has_initial_state = static_cast<const std::uint8_t*>(sequences.has_initial_state.data),
                           .num_accepted = static_cast<const std::int32_t*>(sequences.num_accepted.data),
                           .snapshot_slots = static_cast<const std::int32_t*>(sequences.snapshot_slots.data),
                           .snapshot_offsets = static_cast<const std::int32_t*>(sequences.snapshot_offsets.data),
                           .slot_stride = conv_state.stride[0],
                           .channel_stride = conv_state.stride[1],
                           .out = static_cast<T*>(out.data),
                           .out_stride = out.stride[0]};
    const auto launch = [&]<int kVector, int kTaps, class State>(State* state) {
      const int per_block = kThreads * kVector;
      const DependentLaunch launch{
          .grid = dim3(num_tiles, static_cast<unsigned>((shape.conv_dim() + per_block - 1) / per_block)),
          .block = dim3(kThreads),
          .stream = native(stream)};
      launch(causal_conv_kernel<T, State, kVector, kTaps>, params, state);
    };
    constexpr int kVector = 4;
    const bool is_aligned =
        reinterpret_cast<std::uintptr_t>(proj.data) % (kVector * sizeof(T)) == 0 &&
        reinterpret_cast<std::uintptr_t>(out.data) % (kVector * sizeof(T)) == 0 &&
        is_multiple(kVector, {shape.key_head_dim, shape.value_head_dim, layout.q, layout.q_stride, layout.k,
                              layout.k_stride, layout.v, layout.v_group_stride, proj.stride[0], out.stride[0]});
    visit_float(conv_state.dtype, [&]<class State>(State) {
      auto* const state = static_cast<State*>(conv_state.data);
      const bool is_fast = shape.conv_kernel == 4 && is_aligned;
      if (is_fast)
        launch.template operator()<kVector, 4>(state);
      else
        launch.template operator()<1, 0>(state);
      if (!sequences.has_drafts()) return;
      const DependentLaunch verified{.grid = dim3(static_cast<unsigned>(num_seqs),
                                                  static_cast<unsigned>((shape.conv_dim() + kThreads - 1) / kThreads)),
                                     .block = dim3(kThreads),
                                     .stream = native(stream)};
      verified(is_fast ? verified_conv_kernel<T, State, true> : verified_conv_kernel<T, State, false>, params, state);
    });
  });
}

}  // namespace deltaic::cuda

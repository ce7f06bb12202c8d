// One decode step of a Gated DeltaNet layer for many sequences.
//   a persistent block streams the states of its (sequence, key head) items in through shared memory by bulk copies and
//   writes them from registers; two groups of warps take turns, so that one convolves while the other updates states;
//   what an item's convolution needs is loaded an item ahead
//   o = e^g (S q) + u (k q), as in gdn_decode.cu; 8 lanes a state row
//   bound by memory: 2 x num_value_heads x 128 x 128 x sizeof(state) bytes a sequence
#include <algorithm>

#include "cuda/device/bulk_copy.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_decode.cuh"

namespace deltaic::cuda {
namespace {

using namespace gdn_decode_detail;

constexpr int kThreads = 256;  // of a group
constexpr int kWarps = kThreads / 32;

constexpr int kStageRows = 32;
constexpr int kStagesPerHead = kDim / kStageRows;
constexpr int kGroups = 2;    // of kWarps warps each
constexpr int kRowLanes = 8;  // lanes of a state row
constexpr int kLaneColumns = kDim / kRowLanes;
constexpr int kValueTurns = kMaxHeadsPerGroup * kDim / kThreads;  // channels of v that a thread convolves
constexpr int kStreamThreads = kGroups * (kThreads + 32);         // and a warp a group that loads
static_assert(kStageRows == kWarps * (32 / kRowLanes));

template <class T, class State, int kStages>
struct Stream {
  // A group and its producer have a ring of their own: whoever waits for a stage has itself used it the time before, so
  // the parity of a barrier is never ambiguous.
  struct Group {
    alignas(128) State stages[kStages][kStageRows * kDim];
    alignas(8) std::uint64_t full[kStages];  // a stage has arrived
    std::uint64_t empty[kStages];            // all warps have read their rows of a stage
    alignas(16) float q[kDim];
    float k[kDim], v[kMaxHeadsPerGroup][kDim], o[2][kDim];
    float norms[2][kDim / 32], squares[2][kWarps], decay[kMaxHeadsPerGroup], beta[kMaxHeadsPerGroup];
  } groups[kGroups];
  float4 conv_weight[(2 + kMaxHeadsPerGroup) * kDim];  // q, k, v of the key head
};

// The columns of a row that a lane has: pieces of 16 bytes, the same piece of the 8 lanes side by side.
__device__ inline void load_columns(const float* row, int lane, float (&values)[kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < kLaneColumns / 4; ++i) {
    const float4 piece = *reinterpret_cast<const float4*>(row + (i * kRowLanes + lane) * 4);
    values[4 * i] = piece.x, values[4 * i + 1] = piece.y, values[4 * i + 2] = piece.z, values[4 * i + 3] = piece.w;
  }
}
__device__ inline void store_columns(float* row, int lane, const float (&values)[kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < kLaneColumns / 4; ++i)
    __stcs(reinterpret_cast<float4*>(row + (i * kRowLanes + lane) * 4),
           float4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]});
}
__device__ inline void load_columns(const __nv_bfloat16* row, int lane, float (&values)[kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < kLaneColumns / 8; ++i) {
    const uint4 piece = *reinterpret_cast<const uint4*>(row + (i * kRowLanes + lane) * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&piece)[j]);
      values[8 * i + 2 * j] = two.x, values[8 * i + 2 * j + 1] = two.y;
    }
  }
}
__device__ inline void store_columns(__nv_bfloat16* row, int lane, const float (&values)[kLaneColumns]) {
#pragma unroll
  for (int i = 0; i < kLaneColumns / 8; ++i) {
    __nv_bfloat162 piece[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) piece[j] = __floats2bfloat162_rn(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
    __stcs(reinterpret_cast<uint4*>(row + (i * kRowLanes + lane) * 8), *reinterpret_cast<const uint4*>(piece));
  }
}
// From a row of floats: the columns that load_columns(const State*) reads.
template <class State>
__device__ void load_columns_as(const float* row, int lane, float (&values)[kLaneColumns]) {
  constexpr int kPiece = 16 / sizeof(State);
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) values[i] = row[(i / kPiece * kRowLanes + lane) * kPiece + i % kPiece];
}

__device__ inline float row_sum(float value) {
#pragma unroll
  for (int mask = kRowLanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(~0U, value, mask);
  return value;
}

__device__ inline void group_sync(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
}

// What a thread needs of an item to convolve its channels and to gate its output; loaded an item ahead.
template <class T>
struct ItemInputs {
  std::int64_t seq;
  int slot;
  bool has_state;
  T qk, qk_state[kTaps - 1];
  T v[kValueTurns], v_state[kValueTurns][kTaps - 1];
  T z[kMaxHeadsPerGroup], a, b;
};

// num_items (sequence, key head) pairs; the grid is a multiple of the key heads, so that a block keeps its key head.
template <class T, class State, int kStages>
__global__ void __launch_bounds__(kStreamThreads, 1)
    gdn_decode_stream_kernel(const __grid_constant__ GdnDecodeParams<T, State> p, int num_items) {
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<Stream<T, State, kStages>*>(shared_bytes);
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const int key_head = static_cast<int>(blockIdx.x) % p.shape.num_key_heads;
  const std::int64_t first_head = static_cast<std::int64_t>(key_head) * heads_per_group;
  const int num_turns = (num_items - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                        static_cast<int>(gridDim.x);  // items of this block
  const int num_values = heads_per_group * kDim;      // channels of v
  if (threadIdx.x < kGroups)
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.groups[threadIdx.x].full[i], 1);
      barrier_init(&shared.groups[threadIdx.x].empty[i], kWarps);
    }
  fence_barrier_init();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kDim + num_values; i += kStreamThreads) {
    const std::int64_t channel = i < 2 * kDim ? (i / kDim * p.shape.num_key_heads + key_head) * kDim + i % kDim
                                              : (2LL * p.shape.num_key_heads + first_head) * kDim + i - 2 * kDim;
    shared.conv_weight[i] = *reinterpret_cast<const float4*>(p.conv_weight + channel * kTaps);
  }
  __syncthreads();

  const auto seq_of = [&](int turn) {
    return static_cast<std::int64_t>(blockIdx.x + turn * gridDim.x) / p.shape.num_key_heads;
  };
  const auto slot_of = [&](int turn) {
    return turn < num_turns ? p.state_indices[seq_of(turn) * p.state_indices_stride] : -1;
  };
  if (threadIdx.x >= kGroups * kThreads) {  // a producer
    if (threadIdx.x % 32 == 0) {
      const int group = (static_cast<int>(threadIdx.x) - kGroups * kThreads) / 32;
      auto& ring = shared.groups[group];
      int stage = 0, phase = 0;
      for (int turn = group; turn < num_turns; turn += kGroups) {
        const std::int64_t slot = slot_of(turn);
        if (slot < 0) continue;
        const State* source = p.temporal + slot * p.temporal_slot_stride + first_head * kDim * kDim;
        for (int i = 0; i < heads_per_group * kStagesPerHead; ++i, source += kStageRows * kDim) {
          barrier_wait(&ring.empty[stage], phase ^ 1);
          barrier_expect(&ring.full[stage], kStageRows * kDim * sizeof(State));
          bulk_load(ring.stages[stage], source, kStageRows * kDim * sizeof(State), &ring.full[stage]);
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
      }
    }
    return;
  }

  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, warp = thread / 32, lane = thread % 32;
  auto& mine = shared.groups[group];
  const int c = thread % kDim;
  const bool is_key = thread >= kDim;
  const std::int64_t qk_column =
      (is_key ? p.layout.k + key_head * p.layout.k_stride : p.layout.q + key_head * p.layout.q_stride) + c;
  const std::int64_t qk_channel = (is_key ? p.shape.num_key_heads * kDim : 0) + key_head * kDim + c;
  const std::int64_t v_channel = 2LL * p.shape.num_key_heads * kDim + first_head * kDim + thread;
  const float norm_weight = p.norm_weight[c];
  float A_log = 0.0F, dt_bias = 0.0F;
  if (thread < heads_per_group) A_log = p.A_log[first_head + thread], dt_bias = p.dt_bias[first_head + thread];

  const auto load_states = [&](int turn, int slot, ItemInputs<T>& item) {
    item.seq = seq_of(turn), item.slot = slot, item.has_state = false;
    if (slot < 0) return;
    item.has_state = p.has_initial_state[item.seq] != 0;
    const T* conv_slot = p.conv_state + slot * p.conv_slot_stride;
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) {
      item.qk_state[i] = conv_slot[qk_channel * p.conv_channel_stride + i];
#pragma unroll
      for (int j = 0; j < kValueTurns; ++j)
        if (j * kThreads + thread < num_values)
          item.v_state[j][i] = conv_slot[(v_channel + j * kThreads) * p.conv_channel_stride + i];
    }
  };
  const auto load_projections = [&](ItemInputs<T>& item) {
    if (item.slot < 0) return;
    const T* proj = p.proj + item.seq * p.proj_stride;
    item.qk = proj[qk_column];
#pragma unroll
    for (int j = 0; j < kValueTurns; ++j)
      if (j * kThreads + thread < num_values)
        item.v[j] = proj[p.layout.v + key_head * p.layout.v_group_stride + j * kThreads + thread];
#pragma unroll
    for (int j = 0; j < kMaxHeadsPerGroup; ++j)
      if (j < heads_per_group && thread < kDim)
        item.z[j] = proj[p.layout.z + key_head * p.layout.z_group_stride + j * kDim + thread];
    if (thread < heads_per_group) {
      item.a = proj[p.layout.a + key_head * p.layout.a_group_stride + thread];
      item.b = proj[p.layout.b + key_head * p.layout.b_group_stride + thread];
    }
  };

  ItemInputs<T> next{};
  load_states(group, slot_of(group), next);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (group < num_turns) load_projections(next);
  int next_slot = slot_of(group + kGroups);
  const int row_in_stage = warp * (32 / kRowLanes) + lane / kRowLanes, row_lane = lane % kRowLanes;
  int stage = 0, phase = 0;
  for (int turn = group; turn < num_turns; turn += kGroups) {
    const ItemInputs<T> item = next;
    T* out = p.out + (item.seq * p.shape.num_value_heads + first_head) * kDim;
    if (item.slot >= 0) {
      T* conv_slot = p.conv_state + item.slot * p.conv_slot_stride;
      const auto convolve_channel = [&](std::int64_t channel, const T(&state)[kTaps - 1], float4 weight, T input) {
        T window[kTaps - 1];
        const float value = convolve(state, item.has_state, weight, input, window);
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i) conv_slot[channel * p.conv_channel_stride + i] = window[i];
        return value;
      };
      const float qk = convolve_channel(qk_channel, item.qk_state, shared.conv_weight[thread], item.qk);
#pragma unroll
      for (int j = 0; j < kValueTurns; ++j) {
        const int i = j * kThreads + thread;
        if (i < num_values)
          mine.v[i / kDim][i % kDim] =
              convolve_channel(v_channel + j * kThreads, item.v_state[j], shared.conv_weight[2 * kDim + i], item.v[j]);
      }
      if (thread < heads_per_group) {
        mine.decay[thread] = expf(log_decay(to_float(item.a), A_log, dt_bias));
        mine.beta[thread] = sigmoid(to_float(item.b));
      }
      const float square = warp_sum(qk * qk);
      if (lane == 0) mine.norms[is_key][warp % 4] = square;
      group_sync(group);
      const float norm = mine.norms[is_key][0] + mine.norms[is_key][1] + mine.norms[is_key][2] + mine.norms[is_key][3];
      (is_key ? mine.k : mine.q)[c] = qk * rsqrtf(norm + 1e-6F) * (is_key ? 1.0F : kQueryScale);
      group_sync(group);
    }
    if (turn + kGroups < num_turns) {
      load_states(turn + kGroups, next_slot, next);
      load_projections(next);
      next_slot = slot_of(turn + 2 * kGroups);
    }
    if (item.slot < 0) {
      for (int i = thread; i < num_values; i += kThreads) out[i] = from_float<T>(0.0F);
      continue;
    }

    float q[kLaneColumns], k[kLaneColumns], kq = 0.0F;
    load_columns_as<State>(mine.q, row_lane, q);
    load_columns_as<State>(mine.k, row_lane, k);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) kq += q[i] * k[i];
    kq = row_sum(kq);
    State* target = p.temporal + item.slot * p.temporal_slot_stride + (first_head * kDim + row_in_stage) * kDim;
#pragma unroll
    for (int j = 0; j < kMaxHeadsPerGroup; ++j) {
      if (j == heads_per_group) break;
      const float decay = mine.decay[j], beta = mine.beta[j];
      float squares = 0.0F;
#pragma unroll 1
      for (int part = 0; part < kStagesPerHead; ++part, target += kStageRows * kDim) {
        barrier_wait(&mine.full[stage], phase);
        float s[kLaneColumns] = {}, sk = 0.0F, sq = 0.0F;
        if (item.has_state) load_columns(mine.stages[stage] + row_in_stage * kDim, row_lane, s);
        __syncwarp();
        if (lane == 0) barrier_arrive(&mine.empty[stage]);
        if (++stage == kStages) stage = 0, phase ^= 1;
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) sk += s[i] * k[i], sq += s[i] * q[i];
        sk = row_sum(sk), sq = row_sum(sq);
        const float u = beta * (mine.v[j][part * kStageRows + row_in_stage] - decay * sk);
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) s[i] = decay * s[i] + u * k[i];
        store_columns(target, row_lane, s);
        const float o = decay * sq + u * kq;
        if (row_lane == 0) {
          squares += o * o;
          mine.o[j % 2][part * kStageRows + row_in_stage] = o;
        }
      }
      squares = warp_sum(squares);
      if (lane == 0) mine.squares[j % 2][warp] = squares;
      group_sync(group);
      if (thread < kDim) {
        float total = 0.0F;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total += mine.squares[j % 2][i];
        out[j * kDim + thread] = from_float<T>(mine.o[j % 2][thread] * rsqrtf(total / kDim + p.eps) * norm_weight *
                                               silu(to_float(item.z[j])));
      }
    }
  }
}

template <class T, class State>
void launch_stream(ops::Stream stream, const GdnDecodeArgs& args) {
  constexpr int kStages = sizeof(State) == 4 ? 6 : 12;
  const auto kernel = gdn_decode_stream_kernel<T, State, kStages>;
  constexpr std::size_t shared_bytes = sizeof(Stream<T, State, kStages>);
  static_assert(shared_bytes <= 227 * 1024);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, args.proj.device.index));
  const int num_items = static_cast<int>(args.proj.shape[0]) * args.shape.num_key_heads;
  const int num_blocks = std::max(num_sms / args.shape.num_key_heads, 1) * args.shape.num_key_heads;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(std::min(num_items, num_blocks))),
                               .block = dim3(kStreamThreads),
                               .stream = native(stream),
                               .shared_bytes = shared_bytes};
  launch(kernel, make_gdn_decode_params<T, State>(args), num_items);
}

}  // namespace

void gdn_decode_stream(ops::Stream stream, const GdnDecodeArgs& args) {
  visit_float(args.proj.dtype, [&]<class T>(T) {
    args.temporal.dtype == DType::f32 ? launch_stream<T, float>(stream, args)
                                      : launch_stream<T, __nv_bfloat16>(stream, args);
  });
}

}  // namespace deltaic::cuda

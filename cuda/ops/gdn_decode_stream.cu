// One decode step of a Gated DeltaNet layer for many sequences.
//   a persistent block takes (sequence, key head) pairs; two groups of warps take their value heads in turn
//   states stream in through shared memory by bulk copies, from before the wait for the projections on, and are written
//   from registers
//   meanwhile all warps convolve, a pair each, and leave what the heads need in the workspace, from where it is copied
//   back in a head ahead
//   o = e^g (S q) + u (k q), as in gdn_decode.cu; 8 lanes a state row
//   bound by memory: 2 x num_value_heads x 128 x 128 x sizeof(state) bytes a sequence
#include <algorithm>

#include "cpp/src/check.h"
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
constexpr int kLaneChannels = kDim / 32;                   // of a head that a lane convolves
constexpr int kStreamThreads = kGroups * (kThreads + 64);  // a warp a group loads states, another inputs
static_assert(kStageRows == kWarps * (32 / kRowLanes));

// Of a (sequence, value head).
struct alignas(16) HeadInputs {
  float q[kDim], k[kDim], v[kDim];
  float gate[kDim];  // norm_weight * silu(z)
  float4 scalars;    // decay, beta, k q
};

template <class State, int kStages>
struct StreamShared {
  // Whoever waits for a stage or a buffer of inputs has itself used it the time before, so the parity of a barrier is
  // never ambiguous.
  struct Group {
    alignas(128) State stages[kStages][kStageRows * kDim];
    HeadInputs inputs[2];
    alignas(8) std::uint64_t full[kStages];  // a stage has arrived
    std::uint64_t empty[kStages];            // all warps have read their rows of a stage
    std::uint64_t inputs_full[2], inputs_empty[2];
    float o[2][kDim], squares[2][kWarps];
  } groups[kGroups];
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

// Channels first, first + 32, ... of a lane through the convolution; first_input is the input of channel `first`.
template <class T, class State>
struct Channels {
  T state[kLaneChannels][kTaps - 1], input[kLaneChannels];
  float4 weight[kLaneChannels];

  __device__ void load(const GdnDecodeParams<T, State>& p, const T* conv_slot, std::int64_t first,
                       const T* first_input) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) state[i][j] = conv_slot[(first + i * 32) * p.conv_channel_stride + j];
      input[i] = first_input[i * 32];
      weight[i] = *reinterpret_cast<const float4*>(p.conv_weight + (first + i * 32) * kTaps);
    }
  }
  // Stores the windows.
  __device__ void convolve_all(const GdnDecodeParams<T, State>& p, T* conv_slot, std::int64_t first, bool has_state,
                               float (&values)[kLaneChannels]) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      T window[kTaps - 1];
      values[i] = convolve(state[i], has_state, weight[i], input[i], window);
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) conv_slot[(first + i * 32) * p.conv_channel_stride + j] = window[j];
    }
  }
};

// Where the channels of a pair begin: q, k, and head j's v.
struct FirstChannels {
  std::int64_t q, k, v;
  __device__ FirstChannels(const ops::GdnShape& shape, int key_head, int heads_per_group, int lane)
      : q(key_head * kDim + lane),
        k((shape.num_key_heads + key_head) * kDim + lane),
        v((2LL * shape.num_key_heads + key_head * heads_per_group) * kDim + lane) {}
};

// Asks for the conv state of a pair to be in L2.
template <class T, class State>
__device__ void prefetch_conv_state(const GdnDecodeParams<T, State>& p, int pair, int lane) {
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const std::int64_t slot = p.state_indices[pair / p.shape.num_key_heads * p.state_indices_stride];
  if (slot < 0) return;
  const T* conv_slot = p.conv_state + slot * p.conv_slot_stride;
  const FirstChannels first(p.shape, pair % p.shape.num_key_heads, heads_per_group, lane);
  const auto prefetch = [&](std::int64_t channel) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(conv_slot + (channel + i * 32) * p.conv_channel_stride));
  };
  prefetch(first.q), prefetch(first.k);
  for (int j = 0; j < heads_per_group; ++j) prefetch(first.v + j * kDim);
}

// A warp: convolution, norms and gates of a pair; what its heads need goes to `heads`.
template <class T, class State>
__device__ void prepare_pair(const GdnDecodeParams<T, State>& p, int pair, int lane, HeadInputs* heads) {
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const int key_head = pair % p.shape.num_key_heads, first_head = key_head * heads_per_group;
  const std::int64_t seq = pair / p.shape.num_key_heads, slot = p.state_indices[seq * p.state_indices_stride];
  if (slot < 0) {
    T* out = p.out + (seq * p.shape.num_value_heads + first_head) * kDim;
    for (int i = lane; i < heads_per_group * kDim; i += 32) out[i] = from_float<T>(0.0F);
    return;
  }
  const bool has_state = p.has_initial_state[seq] != 0;
  T* conv_slot = p.conv_state + slot * p.conv_slot_stride;
  const T* proj = p.proj + seq * p.proj_stride;
  const FirstChannels first(p.shape, key_head, heads_per_group, lane);
  float decay = 0.0F, beta = 0.0F;
  float q[kLaneChannels], k[kLaneChannels], squares_q = 0.0F, squares_k = 0.0F, kq = 0.0F;
  {
    Channels<T, State> of_q, of_k;
    of_q.load(p, conv_slot, first.q, proj + p.layout.q + key_head * p.layout.q_stride + lane);
    of_k.load(p, conv_slot, first.k, proj + p.layout.k + key_head * p.layout.k_stride + lane);
    if (lane < heads_per_group) {
      const float a = to_float(proj[p.layout.a + key_head * p.layout.a_group_stride + lane]);
      beta = sigmoid(to_float(proj[p.layout.b + key_head * p.layout.b_group_stride + lane]));
      decay = expf(log_decay(a, p.A_log[first_head + lane], p.dt_bias[first_head + lane]));
    }
    of_q.convolve_all(p, conv_slot, first.q, has_state, q);
    of_k.convolve_all(p, conv_slot, first.k, has_state, k);
  }
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) squares_q += q[i] * q[i], squares_k += k[i] * k[i], kq += k[i] * q[i];
  const float scale_q = rsqrtf(warp_sum(squares_q) + 1e-6F) * kQueryScale;
  const float scale_k = rsqrtf(warp_sum(squares_k) + 1e-6F);
  kq = warp_sum(kq) * scale_q * scale_k;
  for (int j = 0; j < heads_per_group; ++j) {
    Channels<T, State> of_v;
    of_v.load(p, conv_slot, first.v + j * kDim,
              proj + p.layout.v + key_head * p.layout.v_group_stride + j * kDim + lane);
    T z[kLaneChannels];
    float v[kLaneChannels], norm_weight[kLaneChannels];
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      z[i] = proj[p.layout.z + key_head * p.layout.z_group_stride + j * kDim + lane + i * 32];
      norm_weight[i] = p.norm_weight[lane + i * 32];
    }
    of_v.convolve_all(p, conv_slot, first.v + j * kDim, has_state, v);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const int c = lane + i * 32;
      heads[j].q[c] = q[i] * scale_q, heads[j].k[c] = k[i] * scale_k;
      heads[j].v[c] = v[i], heads[j].gate[c] = norm_weight[i] * silu(to_float(z[i]));
    }
  }
  if (lane < heads_per_group) heads[lane].scalars = {decay, beta, kq, 0.0F};
}

template <class T, class State, int kStages>
__global__ void __launch_bounds__(kStreamThreads, 1)
    gdn_decode_stream_kernel(const __grid_constant__ GdnDecodeParams<T, State> p, HeadInputs* inputs, int num_pairs) {
#if __CUDA_ARCH__ >= 900  // can_decode_gdn
  extern __shared__ char shared_bytes[];
  auto& shared = *reinterpret_cast<StreamShared<State, kStages>*>(shared_bytes);
  if (threadIdx.x < kGroups) {
    auto& mine = shared.groups[threadIdx.x];
    for (int i = 0; i < kStages; ++i) barrier_init(&mine.full[i], 1), barrier_init(&mine.empty[i], kWarps);
    for (int i = 0; i < 2; ++i) barrier_init(&mine.inputs_full[i], 1), barrier_init(&mine.inputs_empty[i], kWarps);
  }
  fence_barrier_init();
  __syncthreads();

  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const bool is_loader = threadIdx.x >= kGroups * kThreads;
  const int loader = (static_cast<int>(threadIdx.x) - kGroups * kThreads) / 32;
  const int group = is_loader ? loader % kGroups : static_cast<int>(threadIdx.x) / kThreads;
  auto& mine = shared.groups[group];
  // Calls f(item, head, sequence, slot) for the heads of this group that are no padding; an item is a head of a
  // sequence.
  const auto for_each_item = [&](const auto& f) {
    for (int n = group;; n += kGroups) {
      const int pair = static_cast<int>(blockIdx.x) + n / heads_per_group * static_cast<int>(gridDim.x);
      if (pair >= num_pairs) return;
      const std::int64_t seq = pair / p.shape.num_key_heads;
      const int head = pair % p.shape.num_key_heads * heads_per_group + n % heads_per_group;
      const std::int64_t slot = p.state_indices[seq * p.state_indices_stride];
      if (slot >= 0) f(seq * p.shape.num_value_heads + head, head, seq, slot);
    }
  };
  const auto state_of = [&](int head, std::int64_t slot) {
    return p.temporal + slot * p.temporal_slot_stride + head * (kDim * kDim);
  };
  // All threads but those that load states.
  const auto inputs_are_prepared = [] {
    asm volatile("bar.sync %0, %1;" ::"n"(kGroups + 1), "n"(kGroups * (kThreads + 32)) : "memory");
  };
  if (is_loader && loader < kGroups) {
    if (threadIdx.x % 32 != 0) return;
    int stage = 0, phase = 0;
    for_each_item([&](std::int64_t, int head, std::int64_t, std::int64_t slot) {
      const State* source = state_of(head, slot);
      for (int i = 0; i < kStagesPerHead; ++i, source += kStageRows * kDim) {
        barrier_wait(&mine.empty[stage], phase ^ 1);
        barrier_expect(&mine.full[stage], kStageRows * kDim * sizeof(State));
        bulk_load(mine.stages[stage], source, kStageRows * kDim * sizeof(State), &mine.full[stage]);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    });
    return;
  }
  if (is_loader) {
    inputs_are_prepared();
    if (threadIdx.x % 32 != 0) return;
    int count = 0;
    for_each_item([&](std::int64_t item, int, std::int64_t, std::int64_t) {
      const int buffer = count % 2;
      barrier_wait(&mine.inputs_empty[buffer], count / 2 & 1 ^ 1);
      barrier_expect(&mine.inputs_full[buffer], sizeof(HeadInputs));
      bulk_load(&mine.inputs[buffer], inputs + item, sizeof(HeadInputs), &mine.inputs_full[buffer]);
      ++count;
    });
    return;
  }

  const int thread = static_cast<int>(threadIdx.x) % kThreads, warp = thread / 32, lane = thread % 32;
  const int first_pair = static_cast<int>(blockIdx.x + threadIdx.x / 32 * gridDim.x);
  if (first_pair < num_pairs) prefetch_conv_state(p, first_pair, lane);
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int pair = first_pair; pair < num_pairs; pair += kGroups * kWarps * static_cast<int>(gridDim.x))
    prepare_pair(p, pair, lane, inputs + static_cast<std::int64_t>(pair) * heads_per_group);
  fence_async_global();
  inputs_are_prepared();

  const int row_in_stage = warp * (32 / kRowLanes) + lane / kRowLanes, row_lane = lane % kRowLanes;
  int stage = 0, phase = 0, count = 0;
  for_each_item([&](std::int64_t item, int head, std::int64_t seq, std::int64_t slot) {
    const bool has_state = p.has_initial_state[seq] != 0;
    State* target = state_of(head, slot) + row_in_stage * kDim;
    const int buffer = count % 2;
    const HeadInputs& in = mine.inputs[buffer];
    barrier_wait(&mine.inputs_full[buffer], count / 2 & 1);
    float q[kLaneColumns], k[kLaneColumns];
    load_columns_as<State>(in.q, row_lane, q);
    load_columns_as<State>(in.k, row_lane, k);
    const float decay = in.scalars.x, beta = in.scalars.y, kq = in.scalars.z;
    float squares = 0.0F;
#pragma unroll 1
    for (int part = 0; part < kStagesPerHead; ++part, target += kStageRows * kDim) {
      barrier_wait(&mine.full[stage], phase);
      float s[kLaneColumns] = {}, sk = 0.0F, sq = 0.0F;
      if (has_state) load_columns(mine.stages[stage] + row_in_stage * kDim, row_lane, s);
      __syncwarp();
      if (lane == 0) barrier_arrive(&mine.empty[stage]);
      if (++stage == kStages) stage = 0, phase ^= 1;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) sk += s[i] * k[i], sq += s[i] * q[i];
      sk = row_sum(sk), sq = row_sum(sq);
      const float u = beta * (in.v[part * kStageRows + row_in_stage] - decay * sk);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) s[i] = decay * s[i] + u * k[i];
      store_columns(target, row_lane, s);
      const float o = decay * sq + u * kq;
      if (row_lane == 0) {
        squares += o * o;
        mine.o[buffer][part * kStageRows + row_in_stage] = o;
      }
    }
    squares = warp_sum(squares);
    if (lane == 0) mine.squares[buffer][warp] = squares;
    group_sync(group);
    if (thread < kDim) {
      float total = 0.0F;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += mine.squares[buffer][i];
      p.out[item * kDim + thread] =
          from_float<T>(mine.o[buffer][thread] * rsqrtf(total / kDim + p.eps) * in.gate[thread]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&mine.inputs_empty[buffer]);
    ++count;
  });
#endif
}

template <class T, class State>
void launch_stream(ops::Stream stream, const GdnDecodeArgs& args) {
  constexpr int kStages = sizeof(State) == 4 ? 6 : 12;
  const auto kernel = gdn_decode_stream_kernel<T, State, kStages>;
  constexpr std::size_t shared_bytes = sizeof(StreamShared<State, kStages>);
  static_assert(shared_bytes <= 227 * 1024);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, args.proj.device.index));
  const int num_pairs = static_cast<int>(args.proj.shape[0]) * args.shape.num_key_heads;
  const int turns = (num_pairs + num_sms - 1) / num_sms;  // pairs of the busiest block
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((num_pairs + turns - 1) / turns)),
                               .block = dim3(kStreamThreads),
                               .stream = native(stream),
                               .shared_bytes = shared_bytes};
  launch(kernel, make_gdn_decode_params<T, State>(args), static_cast<HeadInputs*>(args.workspace.data), num_pairs);
}

}  // namespace

std::size_t gdn_decode_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_seqs) {
  return static_cast<std::size_t>(num_seqs * shape.num_value_heads) * sizeof(HeadInputs);
}

void gdn_decode_stream(ops::Stream stream, const GdnDecodeArgs& args) {
  DELTAIC_CHECK(args.workspace.num_bytes() >= gdn_decode_workspace_bytes(args.shape, args.proj.shape[0]),
                "gdn_decode: the workspace has ", args.workspace.num_bytes(), " bytes, ",
                gdn_decode_workspace_bytes(args.shape, args.proj.shape[0]), " are needed");
  visit_float(args.proj.dtype, [&]<class T>(T) {
    args.temporal.dtype == DType::f32 ? launch_stream<T, float>(stream, args)
                                      : launch_stream<T, __nv_bfloat16>(stream, args);
  });
}

}  // namespace deltaic::cuda

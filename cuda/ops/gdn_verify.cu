// One verified step of a Gated DeltaNet layer, from the projections to the gated norm: 1 to 4 tokens a sequence.
//   few sequences, here: a cluster of r x kSplit blocks a (sequence, key head), as in gdn_decode.cu: the r value heads
//   of a key head share its conv channels; 8 lanes a state row, of which all tokens find the state in registers before
//   the wait for the projections: the state is loaded, the tokens that the last step accepted are repeated from their
//   rows, and the state is written back; the tokens of this step write none, but their rows
//   many: gdn_verify_many.cu
//   bound by memory: 2 x num_value_heads x 128 x 128 x sizeof(state) bytes a sequence, and the rows; by latency here
#include <cooperative_groups.h>

#include "cpp/src/check.h"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_verify.cuh"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;
using namespace gdn_verify_detail;

constexpr int kWarps = kThreads / 32;
constexpr int kMaxClusterItems = 32;  // (sequence, key head) pairs

template <int kRows>
struct VerifyShared {
  // Of the last step.
  alignas(16) float old_k[kMaxTokens][kDim];
  float old_updates[kMaxTokens][kRows], old_decay[kMaxTokens];
  // Of this one.
  alignas(16) float q[kMaxTokens][kDim], k[kMaxTokens][kDim];
  float v[kMaxTokens][kRows], updates[kMaxTokens][kRows], o[kMaxTokens][kRows];
  float decay[kMaxTokens], beta[kMaxTokens];
  float norms[2][kMaxTokens][kDim / 32];
  float squares[kMaxTokens][kRows / 32];  // of o; other blocks of the head read them
};

__device__ inline void advance(float4& s, float decay, float u, float4 k) {
  s = {decay * s.x + u * k.x, decay * s.y + u * k.y, decay * s.z + u * k.z, decay * s.w + u * k.w};
}
template <class T, class State, int kSplit>
__global__ void __launch_bounds__(kThreads, kSplit == 4 ? 4 : 3)
    gdn_verify_kernel(const __grid_constant__ VerifyParams<T, State> params) {
#if __CUDA_ARCH__ >= 900  // can_verify_gdn
  constexpr int kRows = kDim / kSplit, kPasses = kRows / kPassRows;
  __shared__ VerifyShared<kRows> shared;
  const auto& p = params.layer;
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const int rank = static_cast<int>(blockIdx.x) % (heads_per_group * kSplit);
  const int key_head = static_cast<int>(blockIdx.x) / (heads_per_group * kSplit);
  const int head_in_group = rank / kSplit, part = rank % kSplit;
  const int head = key_head * heads_per_group + head_in_group;
  const std::int64_t seq = blockIdx.y;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const Sequence sequence(params, seq);
  const std::int64_t slot = sequence.slot, begin = sequence.begin;
  const int num_tokens = sequence.num_tokens, num_replayed = sequence.num_replayed;
  T* out = p.out + (begin * p.shape.num_value_heads + head) * kDim + part * kRows;
  const std::int64_t out_stride = static_cast<std::int64_t>(p.shape.num_value_heads) * kDim;
  if (sequence.is_padding()) {  // the whole cluster
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int i = thread; i < num_tokens * kRows; i += kThreads)
      out[i / kRows * out_stride + i % kRows] = from_float<T>(0.0F);
    return;
  }
  // The state, row kPassRows * i + thread / kRowLanes of this block in s[i], and the rows of the last step.
  const int row_in_pass = thread / kRowLanes, row_lane = thread % kRowLanes;
  const std::int64_t state_offset =
      (static_cast<std::int64_t>(head) * kDim + part * kRows + row_in_pass) * kDim + row_lane * 4;
  State* state = p.temporal + slot * p.temporal_slot_stride + state_offset;
  float4 s[kPasses][kPieces];
#pragma unroll
  for (int i = 0; i < kPasses; ++i)
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      s[i][j] =
          sequence.has_state ? load4(state + i * kPassRows * kDim + j * 4 * kRowLanes) : float4{0.0F, 0.0F, 0.0F, 0.0F};
  const int replay_size = params.replay_size, first_update = params.replay_update + head * kDim + part * kRows;
  float* const rows = params.replay + slot * params.replay_stride;
  for (int i = thread; i < num_replayed * (kDim / 4); i += kThreads)
    reinterpret_cast<float4*>(shared.old_k)[i] =
        *reinterpret_cast<const float4*>(rows + i / (kDim / 4) * replay_size + key_head * kDim + i % (kDim / 4) * 4);
  for (int i = thread; i < num_replayed * kRows; i += kThreads)
    shared.old_updates[i / kRows][i % kRows] = rows[i / kRows * replay_size + first_update + i % kRows];
  if (thread < num_replayed) shared.old_decay[thread] = rows[thread * replay_size + params.replay_decay + head];

  // Thread c < 128: channel c of q; 128 <= c < 256: of k. Then threads c < kRows: channel part * kRows + c of v.
  const int c = thread % kDim;
  const bool is_key = thread >= kDim;
  const std::int64_t qk_channel =
      (is_key ? p.shape.num_key_heads * kDim : 0) + static_cast<std::int64_t>(key_head) * kDim + c;
  const std::int64_t v_channel =
      2LL * p.shape.num_key_heads * kDim + static_cast<std::int64_t>(head) * kDim + part * kRows + thread % kRows;
  T* const conv_slot = p.conv_state + slot * p.conv_slot_stride;
  T* const qk_state = conv_slot + qk_channel * p.conv_channel_stride;
  T* const v_state = conv_slot + v_channel * p.conv_channel_stride;
  Channel<T> qk, v;
  qk.load_state(qk_state, sequence);
  if (thread < kRows) v.load_state(v_state, sequence);
  const float4 qk_weight = *reinterpret_cast<const float4*>(p.conv_weight + qk_channel * kTaps);
  const float4 v_weight = *reinterpret_cast<const float4*>(p.conv_weight + v_channel * kTaps);
  const float A_log = p.A_log[head], dt_bias = p.dt_bias[head];

  // States and rows are of this layer alone, whose last kernel ended long ago: they may be written before the wait.
  __syncthreads();
  for (int t = 0; t < num_replayed; ++t) {
    const float decay = shared.old_decay[t];
    float update[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) update[i] = shared.old_updates[t][i * kPassRows + row_in_pass];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const float4 k4 = *reinterpret_cast<const float4*>(&shared.old_k[t][j * 4 * kRowLanes + row_lane * 4]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) advance(s[i][j], decay, update[i], k4);
    }
  }
  const auto store_state = [&](State* to) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) store4(to + i * kPassRows * kDim + j * 4 * kRowLanes, s[i][j]);
  };
  if (num_replayed > 0 || !sequence.has_state) store_state(state);

  wait_for_previous_kernel();
  allow_next_kernel();
  const T* const proj = p.proj + begin * p.proj_stride;
  qk.load(proj + (is_key ? p.layout.k + key_head * p.layout.k_stride : p.layout.q + key_head * p.layout.q_stride) + c,
          p.proj_stride, num_tokens);
  if (thread < kRows)
    v.load(proj + p.layout.v + key_head * p.layout.v_group_stride + head_in_group * kDim + part * kRows + thread,
           p.proj_stride, num_tokens);
  if (warp == kWarps - 1 && lane < num_tokens) {
    const T* const row = proj + lane * p.proj_stride;
    const float a = to_float(row[p.layout.a + key_head * p.layout.a_group_stride + head_in_group]);
    const float b = to_float(row[p.layout.b + key_head * p.layout.b_group_stride + head_in_group]);
    shared.decay[lane] = expf(log_decay(a, A_log, dt_bias));
    shared.beta[lane] = sigmoid(b);
  }
  float unit[kMaxTokens];
#pragma unroll
  for (int t = 0; t < kMaxTokens; ++t) {
    if (t >= num_tokens) break;
    unit[t] = qk.activated(qk_weight, t);
    const float square = warp_sum(unit[t] * unit[t]);
    if (lane == 0) shared.norms[is_key][t][warp % 4] = square;
    if (thread < kRows) shared.v[t][thread] = v.activated(v_weight, t);
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kMaxTokens; ++t) {
    if (t >= num_tokens) break;
    const float* const norms = shared.norms[is_key][t];
    const float scale = rsqrtf(norms[0] + norms[1] + norms[2] + norms[3] + 1e-6F) * (is_key ? 1.0F : kQueryScale);
    (is_key ? shared.k : shared.q)[t][c] = unit[t] * scale;
  }
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();  // q and k are whole; every block of the cluster has read its conv channels and old rows

  if (rank == 0) {
    qk.store(qk_state, p.conv_slot_stride, sequence);
    for (int i = thread; i < num_tokens * kDim; i += kThreads)
      rows[i / kDim * replay_size + key_head * kDim + i % kDim] = shared.k[i / kDim][i % kDim];
  }
  if (thread < kRows) v.store(v_state, p.conv_slot_stride, sequence);
  if (part == 0 && thread < num_tokens) rows[thread * replay_size + params.replay_decay + head] = shared.decay[thread];

  for (int t = 0; t < num_tokens; ++t) {
    const float decay = shared.decay[t], beta = shared.beta[t];
    float update[kPasses], products[kPasses];
    {
      float4 k4[kPieces];
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        k4[j] = *reinterpret_cast<const float4*>(&shared.k[t][j * 4 * kRowLanes + row_lane * 4]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        float sk = 0.0F;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) sk += dot4(s[i][j], k4[j]);
        update[i] = beta * (shared.v[t][i * kPassRows + row_in_pass] - decay * row_sum(sk));
#pragma unroll
        for (int j = 0; j < kPieces; ++j) advance(s[i][j], decay, update[i], k4[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) products[i] = 0.0F;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const float4 q4 = *reinterpret_cast<const float4*>(&shared.q[t][j * 4 * kRowLanes + row_lane * 4]);
#pragma unroll
      for (int i = 0; i < kPasses; ++i) products[i] += dot4(s[i][j], q4);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const float o = row_sum(products[i]);
      if (row_lane == 0) {
        shared.o[t][i * kPassRows + row_in_pass] = o;
        shared.updates[t][i * kPassRows + row_in_pass] = update[i];
      }
    }
    if (t == sequence.snapshot_offset)
      store_state(p.temporal + sequence.snapshot_slot * p.temporal_slot_stride + state_offset);
  }
  __syncthreads();

  // The gated norm runs over all rows of the head: the blocks of a head add their sums of squares. A thread a token and
  // row.
  static_assert(kMaxTokens * kRows <= kThreads);
  const int token = thread / kRows, row = thread % kRows;
  const bool is_row = token < num_tokens;
  float o = 0.0F;
  if (is_row) {
    o = shared.o[token][row];
    rows[token * replay_size + first_update + row] = shared.updates[token][row];
    const float partial = warp_sum(o * o);
    if (lane == 0) shared.squares[token][row / 32] = partial;
  }
  cluster.sync();
  if (is_row) {
    float total = 0.0F;
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      const auto* squares = cluster.map_shared_rank(&shared.squares[token][0], head_in_group * kSplit + i);
#pragma unroll
      for (int j = 0; j < kRows / 32; ++j) total += squares[j];
    }
    const int column = part * kRows + row;
    const float z = to_float(
        proj[token * p.proj_stride + p.layout.z + key_head * p.layout.z_group_stride + head_in_group * kDim + column]);
    out[token * out_stride + row] = from_float<T>(o * rsqrtf(total / kDim + p.eps) * p.norm_weight[column] * silu(z));
  }
  cluster.sync();  // no block leaves while another reads its sums
#endif
}

template <class T, class State, int kSplit>
void launch_verify(ops::Stream stream, const GdnVerifyArgs& args) {
  const ops::GdnShape& shape = args.layer.shape;
  const unsigned cluster = static_cast<unsigned>(shape.heads_per_group() * kSplit);
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(shape.num_key_heads) * cluster,
                                            static_cast<unsigned>(args.num_accepted.shape[0])),
                               .block = dim3(kThreads),
                               .stream = native(stream),
                               .cluster = cluster};
  launch(gdn_verify_kernel<T, State, kSplit>, make_verify_params<T, State>(args));
}

}  // namespace

bool can_verify_gdn(const GdnVerifyArgs& args) {
  return can_decode_gdn(args.layer) && args.num_draft_tokens < kMaxTokens && args.layer.shape.replay_size() % 4 == 0 &&
         args.replay.stride[0] % 4 == 0 && reinterpret_cast<std::uintptr_t>(args.replay.data) % 16 == 0;
}

void gdn_verify(ops::Stream stream, const GdnVerifyArgs& args) {
  DELTAIC_CHECK(can_verify_gdn(args), "gdn_verify: head dims ", args.layer.shape.key_head_dim, " and ",
                args.layer.shape.value_head_dim, ", conv kernel ", args.layer.shape.conv_kernel, ", ",
                args.num_draft_tokens, " drafts");
  if (args.num_accepted.shape[0] * args.layer.shape.num_key_heads > kMaxClusterItems)
    return gdn_verify_many(stream, args);
  visit_float(args.layer.proj.dtype, [&]<class T>(T) {
    const auto launch = [&]<class State>(State) {
      if (args.layer.shape.heads_per_group() <= 2)
        launch_verify<T, State, 4>(stream, args);
      else
        launch_verify<T, State, 2>(stream, args);
    };
    args.layer.temporal.dtype == DType::f32 ? launch(float{}) : launch(__nv_bfloat16{});
  });
}

}  // namespace deltaic::cuda

// One decode step of a Gated DeltaNet layer, from the projections to the gated norm.
//   o = e^g (S q) + u (k q): both products of the old state in one pass, so a state is read and written once
//   few sequences, here: a cluster of r x kSplit blocks a (sequence, key head), so that the whole chip reads; the r
//   value heads of a key head share its conv channels, which one block of the cluster writes after all have read them;
//   a warp a state row, 4 columns a lane; states are loaded before the wait for the projections
//   many: gdn_decode_stream.cu
//   bound by memory: 2 x num_value_heads x 128 x 128 x sizeof(state) bytes a sequence
#include <cooperative_groups.h>

#include "cpp/src/check.h"
#include "cuda/handles.h"
#include "cuda/kernel_limits.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_decode.cuh"

namespace deltaic::cuda {
namespace {

namespace cg = cooperative_groups;
using namespace gdn_decode_detail;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxClusterItems = 64;  // (sequence, key head) pairs

template <class T, class State, int kSplit>
__global__ void __launch_bounds__(kThreads) gdn_decode_kernel(GdnDecodeParams<T, State> p) {
#if __CUDA_ARCH__ >= 900  // can_decode_gdn
  constexpr int kRows = kDim / kSplit, kRowsPerWarp = kRows / kWarps;
  static_assert(kRowsPerWarp >= 1);
  const int heads_per_group = p.shape.num_value_heads / p.shape.num_key_heads;
  const int rank = static_cast<int>(blockIdx.x) % (heads_per_group * kSplit);
  const int key_head = static_cast<int>(blockIdx.x) / (heads_per_group * kSplit);
  const int head_in_group = rank / kSplit, part = rank % kSplit;
  const int head = key_head * heads_per_group + head_in_group;
  const std::int64_t seq = blockIdx.y;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t slot = p.state_indices[seq * p.state_indices_stride];
  T* out = p.out + (seq * p.shape.num_value_heads + head) * kDim + part * kRows;
  if (slot < 0) {  // the whole cluster
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x < kRows) out[threadIdx.x] = from_float<T>(0.0F);
    return;
  }
  const bool has_state = p.has_initial_state[seq] != 0;
  State* state = p.temporal + slot * p.temporal_slot_stride +
                 (static_cast<std::int64_t>(head) * kDim + part * kRows + warp * kRowsPerWarp) * kDim + lane * 4;
  float4 s[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) s[i] = has_state ? load4(state + i * kDim) : float4{0.0F, 0.0F, 0.0F, 0.0F};

  // Thread c < 128: channel c of q; 128 <= c < 256: of k. Then threads c < kRows: channel part * kRows + c of v.
  const int c = static_cast<int>(threadIdx.x) % kDim;
  const bool is_key = threadIdx.x >= kDim;
  const std::int64_t qk_channel =
      (is_key ? p.shape.num_key_heads * kDim : 0) + static_cast<std::int64_t>(key_head) * kDim + c;
  const std::int64_t v_channel =
      2LL * p.shape.num_key_heads * kDim + static_cast<std::int64_t>(head) * kDim + part * kRows + threadIdx.x % kRows;
  T* conv_slot = p.conv_state + slot * p.conv_slot_stride;
  const float4 qk_weight = *reinterpret_cast<const float4*>(p.conv_weight + qk_channel * kTaps);
  const float4 v_weight = *reinterpret_cast<const float4*>(p.conv_weight + v_channel * kTaps);
  const float A_log = p.A_log[head], dt_bias = p.dt_bias[head];

  wait_for_previous_kernel();
  allow_next_kernel();
  const T* proj = p.proj + seq * p.proj_stride;
  __shared__ alignas(16) float q_shared[kDim], k_shared[kDim];  // read four at a time
  __shared__ float v_shared[kRows], norms[2][kDim / 32], o_shared[kRows], kq_parts[4];
  __shared__ float sum_of_squares;
  T qk_window[kTaps - 1], v_window[kTaps - 1];
  const T qk_input =
      proj[(is_key ? p.layout.k + key_head * p.layout.k_stride : p.layout.q + key_head * p.layout.q_stride) + c];
  const float qk = convolve(conv_slot + qk_channel * p.conv_channel_stride, has_state, qk_weight, qk_input, qk_window);
  if (threadIdx.x < kRows) {
    const T v_input =
        proj[p.layout.v + key_head * p.layout.v_group_stride + head_in_group * kDim + part * kRows + threadIdx.x];
    v_shared[threadIdx.x] =
        convolve(conv_slot + v_channel * p.conv_channel_stride, has_state, v_weight, v_input, v_window);
  }
  const float square = warp_sum(qk * qk);
  if (lane == 0) norms[is_key][warp % 4] = square;
  __syncthreads();
  const float norm = norms[is_key][0] + norms[is_key][1] + norms[is_key][2] + norms[is_key][3];
  const float unit = qk * rsqrtf(norm + 1e-6F) * (is_key ? 1.0F : kQueryScale);
  (is_key ? k_shared : q_shared)[c] = unit;
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();  // q_shared and k_shared are whole; every block of the cluster has read its conv channels

  if (rank == 0)
    for (int i = 0; i < kTaps - 1; ++i) conv_slot[qk_channel * p.conv_channel_stride + i] = qk_window[i];
  if (threadIdx.x < kRows)
    for (int i = 0; i < kTaps - 1; ++i) conv_slot[v_channel * p.conv_channel_stride + i] = v_window[i];

  const float4 q4 = *reinterpret_cast<const float4*>(q_shared + lane * 4);
  const float4 k4 = *reinterpret_cast<const float4*>(k_shared + lane * 4);
  const float kq = warp_sum(dot4(q4, k4));
  const float a = to_float(proj[p.layout.a + key_head * p.layout.a_group_stride + head_in_group]);
  const float b = to_float(proj[p.layout.b + key_head * p.layout.b_group_stride + head_in_group]);
  const float decay = expf(log_decay(a, A_log, dt_bias)), beta = sigmoid(b);
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const float sk = warp_sum(dot4(s[i], k4)), sq = warp_sum(dot4(s[i], q4));
    const float u = beta * (v_shared[warp * kRowsPerWarp + i] - decay * sk);
    s[i] = {decay * s[i].x + u * k4.x, decay * s[i].y + u * k4.y, decay * s[i].z + u * k4.z, decay * s[i].w + u * k4.w};
    store4(state + i * kDim, s[i]);
    if (lane == 0) o_shared[warp * kRowsPerWarp + i] = decay * sq + u * kq;
  }
  __syncthreads();

  // The gated norm runs over all rows of the head: the blocks of a head add their sums of squares.
  float o = 0.0F;
  if (threadIdx.x < kRows) o = o_shared[threadIdx.x];
  if (warp < (kRows + 31) / 32) {
    const float partial = warp_sum(o * o);
    if (lane == 0) kq_parts[warp] = partial;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sum_of_squares = 0.0F;
    for (int i = 0; i < (kRows + 31) / 32; ++i) sum_of_squares += kq_parts[i];
  }
  cluster.sync();
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kSplit; ++i) total += *cluster.map_shared_rank(&sum_of_squares, head_in_group * kSplit + i);
  if (threadIdx.x < kRows) {
    const int row = part * kRows + threadIdx.x;
    const float z = to_float(proj[p.layout.z + key_head * p.layout.z_group_stride + head_in_group * kDim + row]);
    out[threadIdx.x] = from_float<T>(o * rsqrtf(total / kDim + p.eps) * p.norm_weight[row] * silu(z));
  }
  cluster.sync();  // no block leaves while another reads its sum
#endif
}

template <class T, class State, int kSplit>
void launch_decode(ops::Stream stream, const GdnDecodeArgs& args) {
  const unsigned cluster = static_cast<unsigned>(args.shape.heads_per_group() * kSplit);
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>(args.shape.num_key_heads) * cluster,
                                            static_cast<unsigned>(args.proj.shape[0])),
                               .block = dim3(kThreads),
                               .stream = native(stream),
                               .cluster = cluster};
  launch(gdn_decode_kernel<T, State, kSplit>, make_gdn_decode_params<T, State>(args));
}

}  // namespace

bool can_decode_gdn(const GdnDecodeArgs& args) {
  return has_large_clusters(args.proj.device.index) && args.shape.key_head_dim == kDim &&
         args.shape.value_head_dim == kDim && args.shape.conv_kernel == kTaps &&
         args.shape.heads_per_group() <= kMaxHeadsPerGroup &&
         (args.temporal.dtype == DType::f32 || args.temporal.dtype == DType::bf16) &&
         reinterpret_cast<std::uintptr_t>(args.temporal.data) % 16 == 0 && args.temporal.stride[1] == kDim * kDim &&
         args.temporal.stride[0] * size_of(args.temporal.dtype) % 16 == 0;
}

void gdn_decode(ops::Stream stream, const GdnDecodeArgs& args) {
  DELTAIC_CHECK(can_decode_gdn(args), "gdn_decode: head dims ", args.shape.key_head_dim, " and ",
                args.shape.value_head_dim, ", conv kernel ", args.shape.conv_kernel);
  visit_float(args.proj.dtype, [&]<class T>(T) {
    const auto launch = [&]<class State>(State) {
      const std::int64_t num_items = args.proj.shape[0] * args.shape.num_key_heads;
      if (num_items > kMaxClusterItems)
        gdn_decode_stream(stream, args);
      else if (args.shape.heads_per_group() <= 2)
        launch_decode<T, State, 4>(stream, args);
      else
        launch_decode<T, State, 2>(stream, args);
    };
    args.temporal.dtype == DType::f32 ? launch(float{}) : launch(__nv_bfloat16{});
  });
}

}  // namespace deltaic::cuda

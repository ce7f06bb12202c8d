// A GDN layer between its projections: decodes in one kernel, the rest in convolution, delta rule and gated norm.
//   the norm: half of a warp kRows (token, head) pairs, in place; bound by memory
#include "cpp/src/ops/gdn_mixer.h"

#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/handles.h"
#include "cuda/launch.cuh"
#include "cuda/ops/gdn_decode.h"
#include "cuda/ops/gdn_math.cuh"
#include "cuda/ops/gdn_prefill.h"
#include "cuda/ops/gdn_verify.h"

namespace deltaic::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 2;    // half of a warp
constexpr int kLanes = 16;  // that
constexpr std::size_t kAlignment = 128;

template <class T>
struct NormParams {
  ops::GdnShape shape;
  std::int64_t z, z_group_stride;
  const T* proj;
  std::int64_t proj_stride;
  const float* weight;
  float eps;
  std::int64_t num_rows;            // tokens times heads
  const std::int32_t* first_token;  // where it begins; null: with the first
  T* out;
};

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T values[kVector];
};

// kVector divides the head dim; rows of out and z are aligned to as many elements. kIsOnePass: a row fits kLanes.
template <class T, int kVector, bool kIsOnePass>
__global__ void __launch_bounds__(kWarps * 32, sizeof(T) == 2 ? 4 : 2)
    gdn_norm_kernel(const __grid_constant__ NormParams<T> p) {
  // No kernel just before this one writes first_token or the weights.
  const std::int64_t skipped = p.first_token == nullptr ? 0 : std::int64_t{*p.first_token} * p.shape.num_value_heads;
  const int part = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first = skipped + (static_cast<std::int64_t>(blockIdx.x) * (kWarps * 32 / kLanes) + part) * kRows;
  const int dim = p.shape.value_head_dim, ratio = p.shape.num_value_heads / p.shape.num_key_heads;
  using Values = Vector<T, kVector>;
  // The gate of row `first`, then of each row after it.
  const std::uint32_t token = static_cast<std::uint32_t>(first) / p.shape.num_value_heads;
  int key_head = static_cast<int>(static_cast<std::uint32_t>(first) % p.shape.num_value_heads) / ratio;
  int in_group = static_cast<int>(static_cast<std::uint32_t>(first) % p.shape.num_value_heads) % ratio;
  const T* token_gates = p.proj + token * p.proj_stride + p.z;
  const auto next_gate = [&] {
    const T* gate = token_gates + key_head * p.z_group_stride + in_group * dim;
    if (++in_group == ratio) in_group = 0, ++key_head;
    if (key_head == p.shape.num_key_heads) key_head = 0, token_gates += p.proj_stride;
    return gate;
  };
  const auto inverse_rms = [&](float sum) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0U, sum, mask);
    return 1.0F / sqrtf(sum / static_cast<float>(dim) + p.eps);
  };
  const auto result = [&](const Values& x, const Values& gate, float scale, const float* weight) {
    Values y;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      y.values[j] = from_float<T>(to_float(x.values[j]) * scale * weight[j] * silu(to_float(gate.values[j])));
    return y;
  };
  if constexpr (kIsOnePass) {
    const int column = lane * kVector;
    Values x[kRows] = {}, gate[kRows] = {};
    float weight[kVector] = {};
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (column < dim) weight[j] = p.weight[column + j];
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const T* gates = next_gate();
      if (first + i < p.num_rows && column < dim) {
        x[i] = *reinterpret_cast<const Values*>(p.out + (first + i) * dim + column);
        gate[i] = *reinterpret_cast<const Values*>(gates + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = 0.0F;
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum += to_float(x[i].values[j]) * to_float(x[i].values[j]);
      const float scale = inverse_rms(sum);
      if (first + i < p.num_rows && column < dim)
        *reinterpret_cast<Values*>(p.out + (first + i) * dim + column) = result(x[i], gate[i], scale, weight);
    }
  } else {
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {  // all lanes, for they exchange sums
      const std::int64_t row = min(first + i, p.num_rows - 1);
      T* out = p.out + row * dim;
      const T* z = next_gate();
      float sum = 0.0F;
      for (int j = lane; j < dim; j += kLanes) sum += to_float(out[j]) * to_float(out[j]);
      const float scale = inverse_rms(sum);
      if (first + i >= p.num_rows) continue;
      for (int j = lane * kVector; j < dim; j += kLanes * kVector)
        *reinterpret_cast<Values*>(out + j) = result(*reinterpret_cast<const Values*>(out + j),
                                                     *reinterpret_cast<const Values*>(z + j), scale, p.weight + j);
    }
  }
}

// num_tokens: the most that there can be from *first_token on.
template <class T>
void norm_and_gate(ops::Stream stream, const ops::GdnMixerArgs& args, const std::int32_t* first_token,
                   std::int64_t num_tokens) {
  const ops::GdnShape& shape = args.shape;
  const std::int64_t most_rows = num_tokens * shape.num_value_heads;
  const NormParams<T> params{.shape = shape,
                             .z = args.layout.z,
                             .z_group_stride = args.layout.z_group_stride,
                             .proj = static_cast<const T*>(args.proj.data),
                             .proj_stride = args.proj.stride[0],
                             .weight = static_cast<const float*>(args.norm_weight.data),
                             .eps = args.eps,
                             .num_rows = args.proj.shape[0] * shape.num_value_heads,
                             .first_token = first_token,
                             .out = static_cast<T*>(args.out.data)};
  constexpr int kBlockRows = kWarps * 32 / kLanes * kRows;
  const DependentLaunch launch{.grid = dim3(static_cast<unsigned>((most_rows + kBlockRows - 1) / kBlockRows)),
                               .block = dim3(kWarps * 32),
                               .stream = native(stream)};
  constexpr int kVector = 8;
  constexpr std::uintptr_t kBytes = kVector * sizeof(T);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(args.proj.data) % kBytes == 0 &&
                          reinterpret_cast<std::uintptr_t>(args.out.data) % kBytes == 0 &&
                          args.proj.stride[0] % kVector == 0 && args.layout.z % kVector == 0 &&
                          args.layout.z_group_stride % kVector == 0 && shape.value_head_dim % kVector == 0;
  if (is_aligned && shape.value_head_dim <= kLanes * kVector)
    launch(gdn_norm_kernel<T, kVector, true>, params);
  else
    launch(gdn_norm_kernel<T, 1, false>, params);
}

std::size_t qkv_bytes(const ops::GdnShape& shape, DType dtype, std::int64_t num_tokens) {
  const std::size_t size = static_cast<std::size_t>(num_tokens * shape.conv_dim()) * size_of(dtype);
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

// Sequences [first, last).
ops::GdnSequences part_of(const ops::GdnSequences& all, std::int64_t first, std::int64_t last) {
  ops::GdnSequences part{.query_start_loc = all.query_start_loc.slice(first, last + 1),
                         .state_indices = all.state_indices.slice(first, last),
                         .has_initial_state = all.has_initial_state.slice(first, last)};
  if (!all.has_drafts()) return part;
  part.num_accepted = all.num_accepted.slice(first, last);
  part.num_draft_tokens = all.num_draft_tokens;
  if (!all.has_snapshots()) return part;
  part.snapshot_slots = all.snapshot_slots.slice(first, last);
  part.snapshot_offsets = all.snapshot_offsets.slice(first, last);
  return part;
}

// The first num_decodes sequences in one kernel. False: there is none for them.
bool run_decodes(ops::Stream stream, const ops::GdnMixerArgs& args, char* memory) {
  const ops::GdnSequences& all = args.sequences;
  const std::int64_t num_decodes = all.num_decodes;
  const std::int64_t num_tokens = all.has_drafts() ? args.proj.shape[0] : num_decodes;
  const std::size_t num_bytes = all.has_drafts() ? gdn_verify_workspace_bytes(args.shape, num_decodes)
                                                 : gdn_decode_workspace_bytes(args.shape, num_decodes);
  const GdnDecodeArgs decode{
      .shape = args.shape,
      .layout = args.layout,
      .proj = args.proj.slice(0, num_tokens),
      .conv_weight = args.conv_weight,
      .A_log = args.A_log,
      .dt_bias = args.dt_bias,
      .norm_weight = args.norm_weight,
      .eps = args.eps,
      .state_indices = all.state_indices.slice(0, num_decodes),
      .has_initial_state = all.has_initial_state.slice(0, num_decodes),
      .conv_state = args.conv_state,
      .temporal = args.temporal,
      .workspace = make_view(memory, DType::u8, {static_cast<std::int64_t>(num_bytes)}, args.proj.device),
      .out = args.out.slice(0, num_tokens)};
  if (!all.has_drafts()) {
    if (!can_decode_gdn(decode)) return false;
    gdn_decode(stream, decode);
    return true;
  }
  const ops::GdnSequences verified = part_of(all, 0, num_decodes);
  const GdnVerifyArgs verify{.layer = decode,
                             .query_start_loc = verified.query_start_loc,
                             .num_accepted = verified.num_accepted,
                             .num_draft_tokens = verified.num_draft_tokens,
                             .snapshot_slots = verified.snapshot_slots,
                             .snapshot_offsets = verified.snapshot_offsets,
                             .replay = args.replay};
  if (!can_verify_gdn(verify)) return false;
  gdn_verify(stream, verify);
  return true;
}

// Convolution and delta rule of some sequences, without the norm.
void run_spans(ops::Stream stream, const ops::GdnMixerArgs& args, const ops::GdnSequences& sequences, char* memory) {
  const std::int64_t num_tokens = args.proj.shape[0];
  const TensorView qkv = make_view(memory, args.proj.dtype, {num_tokens, args.shape.conv_dim()}, args.proj.device);
  memory += qkv_bytes(args.shape, args.proj.dtype, num_tokens);
  causal_conv(stream, args.shape, args.layout, args.proj, args.conv_weight, sequences, args.conv_state, qkv);
  const GdnPrefillArgs prefill{.shape = args.shape,
                               .layout = args.layout,
                               .qkv = qkv,
                               .proj = args.proj,
                               .A_log = args.A_log,
                               .dt_bias = args.dt_bias,
                               .sequences = sequences,
                               .temporal = args.temporal,
                               .workspace = make_view(memory, DType::u8,
                                                      {static_cast<std::int64_t>(gdn_prefill_workspace_bytes(
                                                          args.shape, num_tokens, sequences.state_indices.shape[0]))},
                                                      args.proj.device),
                               .out = args.out};
  if (!sequences.has_drafts() && can_prefill_gdn(prefill))
    gdn_prefill(stream, prefill);
  else
    gated_delta_rule(stream, args.shape, args.layout, qkv, args.proj, args.A_log, args.dt_bias, sequences,
                     args.temporal, args.replay, args.out);
}

}  // namespace

std::size_t gdn_mixer_workspace_bytes(const ops::GdnShape& shape, DType dtype, std::int64_t num_tokens,
                                      std::int64_t num_seqs, std::int64_t num_verified) {
  // Decodes are done with it when the others begin.
  return kAlignment +
         std::max({gdn_decode_workspace_bytes(shape, num_seqs), gdn_verify_workspace_bytes(shape, num_verified),
                   qkv_bytes(shape, dtype, num_tokens) + gdn_prefill_workspace_bytes(shape, num_tokens, num_seqs)});
}

void gdn_mixer(ops::Stream stream, const ops::GdnMixerArgs& args) {
  const ops::GdnSequences& all = args.sequences;
  const std::int64_t num_tokens = args.proj.shape[0], num_seqs = all.state_indices.shape[0];
  auto* memory = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(args.workspace.data) + kAlignment - 1) /
                                         kAlignment * kAlignment);
  const std::int64_t first = all.num_decodes;
  const bool are_done = first > 0 && run_decodes(stream, args, memory);
  if (are_done && (first == num_seqs || first == num_tokens)) return;

  if (first == 0 || (!are_done && !all.has_drafts())) {
    run_spans(stream, args, all, memory);
  } else {
    if (!are_done) run_spans(stream, args, part_of(all, 0, first), memory);
    if (first < num_seqs) {
      ops::GdnSequences rest = part_of(all, first, num_seqs);
      rest.num_accepted = {};  // they are plain
      run_spans(stream, args, rest, memory);
    }
  }
  const auto* start = static_cast<const std::int32_t*>(all.query_start_loc.data);
  const std::int64_t num_done = are_done ? first : 0;  // tokens, at least
  visit_float(args.proj.dtype, [&]<class T>(T) {
    norm_and_gate<T>(stream, args, are_done ? start + first : nullptr, num_tokens - num_done);
  });
}

}  // namespace deltaic::cuda

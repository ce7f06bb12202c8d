#pragma once

#include "cuda/ops/gdn_decode.cuh"
#include "cuda/ops/gdn_verify.h"

// What the kernels of verified steps share: gdn_verify.cu for few sequences, gdn_verify_many.cu for many.

namespace deltaic::cuda {

// In two kernels; gdn_verify chooses.
void gdn_verify_many(ops::Stream stream, const GdnVerifyArgs& args);

namespace gdn_verify_detail {

using namespace gdn_decode_detail;

constexpr int kThreads = 256;
constexpr int kMaxTokens = 4;
constexpr int kRowLanes = 8;                     // of a state row
constexpr int kPieces = kDim / (4 * kRowLanes);  // of 4 columns, that a lane has of a row
constexpr int kPassRows = kThreads / kRowLanes;  // that a block has at a time

template <class T, class State>
struct VerifyParams {
  GdnDecodeParams<T, State> layer;
  const std::int32_t *start, *num_accepted;
  const std::int32_t *snapshot_slots, *snapshot_offsets;  // null: no snapshots
  float* replay;
  std::int64_t replay_stride;
  int replay_size, replay_update, replay_decay;  // of GdnShape
};

// What a kernel knows of a sequence.
struct Sequence {
  std::int64_t slot, begin, snapshot_slot = -1;
  int num_tokens, num_replayed = 0, snapshot_offset = -1;
  bool has_state;

  template <class T, class State>
  __device__ Sequence(const VerifyParams<T, State>& p, std::int64_t seq)
      : slot(p.layer.state_indices[seq * p.layer.state_indices_stride]),
        begin(p.start[seq]),
        num_tokens(min(p.start[seq + 1] - p.start[seq], kMaxTokens)) {
    const auto initial = static_cast<ops::InitialState>(p.layer.has_initial_state[seq]);
    has_state = initial != ops::InitialState::zero;
    if (initial == ops::InitialState::replay) num_replayed = min(max(p.num_accepted[seq], 0), kMaxTokens);
    if (p.snapshot_slots == nullptr || p.snapshot_slots[seq] < 0) return;
    snapshot_slot = p.snapshot_slots[seq], snapshot_offset = p.snapshot_offsets[seq];
    if (snapshot_offset >= num_tokens) snapshot_offset = -1;
  }
  __device__ bool is_padding() const { return slot < 0 || num_tokens <= 0; }
};

// A channel's inputs: those that the conv state keeps, then those of this step.
template <class T>
struct Channel {
  T inputs[kTaps - 1 + kMaxTokens];

  __device__ void load_state(const T* state, const Sequence& sequence) {
    state += max(sequence.num_replayed - 1, 0);
#pragma unroll
    for (int i = 0; i < kTaps - 1; ++i) inputs[i] = sequence.has_state ? state[i] : from_float<T>(0.0F);
  }
  __device__ void load(const T* input, std::int64_t stride, int num_tokens) {
#pragma unroll
    for (int t = 0; t < kMaxTokens; ++t)
      inputs[kTaps - 1 + t] = t < num_tokens ? input[t * stride] : from_float<T>(0.0F);
  }
  __device__ float activated(float4 weight, int t) const {
    return silu(weight.x * to_float(inputs[t]) + weight.y * to_float(inputs[t + 1]) +
                weight.z * to_float(inputs[t + 2]) + weight.w * to_float(inputs[t + 3]));
  }
  // What the next step needs, and the last inputs behind the token of the snapshot.
  __device__ void store(T* state, std::int64_t slot_stride, const Sequence& sequence) const {
#pragma unroll
    for (int i = 1; i < kTaps - 1 + kMaxTokens; ++i)
      if (i < kTaps - 1 + sequence.num_tokens) state[i - 1] = inputs[i];
    if (sequence.snapshot_offset < 0) return;
    T* const snapshot = state + (sequence.snapshot_slot - sequence.slot) * slot_stride;
#pragma unroll
    for (int t = 0; t < kMaxTokens; ++t)
      if (t == sequence.snapshot_offset)
        for (int i = 0; i < kTaps - 1; ++i) snapshot[i] = inputs[t + 1 + i];
  }
};

__device__ inline float row_sum(float value) {
#pragma unroll
  for (int mask = kRowLanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(~0U, value, mask);
  return value;
}

template <class T, class State>
VerifyParams<T, State> make_verify_params(const GdnVerifyArgs& args) {
  const ops::GdnShape& shape = args.layer.shape;
  return {.layer = make_gdn_decode_params<T, State>(args.layer),
          .start = static_cast<const std::int32_t*>(args.query_start_loc.data),
          .num_accepted = static_cast<const std::int32_t*>(args.num_accepted.data),
          .snapshot_slots = static_cast<const std::int32_t*>(args.snapshot_slots.data),
          .snapshot_offsets = static_cast<const std::int32_t*>(args.snapshot_offsets.data),
          .replay = static_cast<float*>(args.replay.data),
          .replay_stride = args.replay.stride[0],
          .replay_size = shape.replay_size(),
          .replay_update = shape.replay_update(),
          .replay_decay = shape.replay_decay()};
}

}  // namespace gdn_verify_detail
}  // namespace deltaic::cuda

// The convolution is split over sequences and segments (the q, k or v of one head), the delta rule over sequences,
// value heads and blocks of their rows; each goes through its tokens in order.
#include <algorithm>
#include <array>
#include <cmath>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/gated_delta_net.h"
#include "cpp/src/ops/kernels/isa.h"
#include "cpp/src/ops/kernels/work.h"

namespace deltaic::cpu {
namespace {

constexpr int kStateRows = 32;  // rows of a head's state in a task
constexpr int kSegment = 64;    // channels of a convolution task
constexpr int kMaxDraftTokens = kMaxConvKernel;

struct Sequence {
  std::int64_t begin = 0, num_tokens = 0, slot = -1;
  bool has_state = false, is_verified = false;
  int num_replayed = 0;  // tokens of its last verified step that its state lacks
  // Of its own tokens, those behind which the states go to another slot; 0: none.
  std::int64_t num_snapshot_tokens = 0, snapshot_slot = -1;

  bool is_certain() const { return is_verified && num_tokens == 1; }  // it has no drafts
};

// Throws InvalidArgument for a slot or a token range outside the tensors.
Sequence sequence_at(const ops::GdnSequences& sequences, std::int64_t i, std::int64_t num_tokens,
                     std::int64_t num_slots) {
  const std::int32_t* start = sequences.query_start_loc.as<std::int32_t>();
  const std::int32_t slot = sequences.state_indices.as<std::int32_t>()[i * sequences.state_indices.stride[0]];
  if (slot < 0) return {};
  DELTAIC_CHECK(0 <= start[i] && start[i] <= start[i + 1] && start[i + 1] <= num_tokens, "sequence ", i, " has tokens ",
                start[i], " to ", start[i + 1], " of ", num_tokens);
  DELTAIC_CHECK(slot < num_slots, "sequence ", i, " has state slot ", slot, ", there are ", num_slots);
  const auto initial = static_cast<ops::InitialState>(sequences.has_initial_state.as<std::uint8_t>()[i]);
  const int num_accepted = sequences.has_drafts() ? sequences.num_accepted.as<std::int32_t>()[i] : 0;
  Sequence sequence{.begin = start[i],
                    .num_tokens = start[i + 1] - start[i],
                    .slot = slot,
                    .has_state = initial != ops::InitialState::zero,
                    .is_verified = num_accepted != 0,
                    .num_replayed = initial == ops::InitialState::replay ? num_accepted : 0};
  if (!sequence.is_verified) {
    DELTAIC_CHECK(initial != ops::InitialState::replay, "sequence ", i,
                  " is plain and its state lacks tokens of a verified step");
    return sequence;
  }
  const int most = 1 + sequences.num_draft_tokens;
  DELTAIC_CHECK(0 < num_accepted && num_accepted <= most, "sequence ", i, " has accepted ", num_accepted,
                " tokens, with ", sequences.num_draft_tokens, " drafts at most");
  DELTAIC_CHECK(sequence.num_tokens <= most, "sequence ", i, " verifies ", sequence.num_tokens, " tokens, with ",
                sequences.num_draft_tokens, " drafts at most");
  if (!sequences.has_snapshots()) return sequence;
  sequence.snapshot_slot = sequences.snapshot_slots.as<std::int32_t>()[i];
  const std::int32_t offset = sequences.snapshot_offsets.as<std::int32_t>()[i];
  DELTAIC_CHECK(sequence.snapshot_slot < num_slots, "sequence ", i, " has snapshot slot ", sequence.snapshot_slot,
                ", there are ", num_slots);
  if (sequence.snapshot_slot >= 0 && 0 <= offset && offset < sequence.num_tokens)
    sequence.num_snapshot_tokens = offset + 1;
  return sequence;
}

// Channels [channel, channel + size) of the plain order lie together in a row of proj, from `offset`.
struct Segment {
  std::int64_t channel, size, offset;
};

// Segment `index` of the q, k and v heads, each cut in pieces of kSegment channels.
class Segments {
 public:
  Segments(const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout) : shape_(shape), layout_(layout) {}
  std::int64_t count() const {
    return 2 * shape_.num_key_heads * pieces(shape_.key_head_dim) +
           shape_.num_value_heads * pieces(shape_.value_head_dim);
  }
  Segment operator[](std::int64_t index) const {
    const std::int64_t per_key = pieces(shape_.key_head_dim), key_pieces = shape_.num_key_heads * per_key;
    const std::int64_t key_dim = std::int64_t{shape_.num_key_heads} * shape_.key_head_dim;
    if (index < 2 * key_pieces) {
      const bool is_query = index < key_pieces;
      const std::int64_t head = index % key_pieces / per_key, begin = index % per_key * kSegment;
      const std::int64_t base = is_query ? layout_.q + head * layout_.q_stride : layout_.k + head * layout_.k_stride;
      return cut(shape_.key_head_dim, (is_query ? 0 : key_dim) + head * shape_.key_head_dim, base, begin);
    }
    const std::int64_t per_value = pieces(shape_.value_head_dim), head = (index - 2 * key_pieces) / per_value;
    const std::int64_t group = head / shape_.heads_per_group(), in_group = head % shape_.heads_per_group();
    const std::int64_t base = layout_.v + group * layout_.v_group_stride + in_group * shape_.value_head_dim;
    return cut(shape_.value_head_dim, 2 * key_dim + head * shape_.value_head_dim, base,
               (index - 2 * key_pieces) % per_value * kSegment);
  }

 private:
  static std::int64_t pieces(std::int64_t dim) { return (dim + kSegment - 1) / kSegment; }
  static Segment cut(std::int64_t dim, std::int64_t channel, std::int64_t base, std::int64_t begin) {
    return {channel + begin, std::min<std::int64_t>(kSegment, dim - begin), base + begin};
  }
  const ops::GdnShape& shape_;
  const ops::GdnProjectionLayout& layout_;
};

// A segment's conv state, f32 | f16 | bf16 channel by channel, to and from f32 rows of channels.
class SegmentState {
 public:
  SegmentState(const Kernels& kernel, const TensorView& conv_state, std::int64_t slot, const Segment& segment)
      : kernel_(kernel),
        type_(float_type(conv_state.dtype)),
        element_(static_cast<std::int64_t>(size_of(conv_state.dtype))),
        size_(segment.size),
        stride_(conv_state.stride[1]),
        num_positions_(static_cast<int>(conv_state.shape[2])),
        data_(static_cast<char*>(conv_state.data) +
              (slot * conv_state.stride[0] + segment.channel * conv_state.stride[1]) * element_) {}

  // Positions [first, first + count) to rows [count, size].
  void load(int first, int count, float* rows) const {
    std::array<float, kCapacity> channels;
    const bool at_once = is_dense();
    const int width = at_once ? num_positions_ : count, offset = at_once ? first : 0;
    if (at_once) {
      kernel_.widen(type_, data_, size_ * width, channels.data());
    } else {
      for (std::int64_t c = 0; c < size_; ++c)
        kernel_.widen(type_, data_ + (c * stride_ + first) * element_, count, channels.data() + c * count);
    }
    for (std::int64_t c = 0; c < size_; ++c)
      for (int j = 0; j < count; ++j) rows[j * size_ + c] = channels[c * width + offset + j];
  }

  // Positions [0, count) from row_at(j)[c]; those behind stay.
  template <class RowAt>
  void store(int count, RowAt row_at) const {
    std::array<float, kCapacity> channels;
    const bool at_once = is_dense();
    const int width = at_once ? num_positions_ : count;
    if (count < width) kernel_.widen(type_, data_, size_ * width, channels.data());
    for (int j = 0; j < count; ++j) {
      const float* row = row_at(j);
      for (std::int64_t c = 0; c < size_; ++c) channels[c * width + j] = row[c];
    }
    if (at_once) return kernel_.narrow(type_, channels.data(), size_ * width, data_);
    for (std::int64_t c = 0; c < size_; ++c)
      kernel_.narrow(type_, channels.data() + c * count, count, data_ + c * stride_ * element_);
  }

  // One row as it would be read back from the state.
  void round(const float* row, float* rounded) const {
    std::array<std::uint32_t, kSegment> stored;
    kernel_.narrow(type_, row, size_, stored.data());
    kernel_.widen(type_, stored.data(), size_, rounded);
  }

 private:
  static constexpr int kCapacity = (kMaxConvKernel + kMaxDraftTokens) * kSegment;

  // All channels lie together, and fit.
  bool is_dense() const { return stride_ == num_positions_ && size_ * num_positions_ <= kCapacity; }

  const Kernels& kernel_;
  Float type_;
  std::int64_t element_, size_, stride_;
  int num_positions_;
  char* data_;
};

// What a convolution of one segment of one sequence is called with.
ConvArgs conv_args(const Sequence& sequence, const Segment& segment, int taps, const TensorView& proj,
                   const TensorView& weight, const float* history, const TensorView& out) {
  return {.num_tokens = sequence.num_tokens,
          .dim = static_cast<int>(segment.size),
          .kernel = taps,
          .input = proj.as<float>() + sequence.begin * proj.stride[0] + segment.offset,
          .input_stride = proj.stride[0],
          .weight = weight.as<float>() + segment.channel * taps,
          .history = history,
          .out = out.as<float>() + sequence.begin * out.stride[0] + segment.channel,
          .out_stride = out.stride[0]};
}

void convolve(const Kernels& kernel, const Sequence& sequence, const Segment& segment, int taps, const TensorView& proj,
              const TensorView& weight, const TensorView& conv_state, const TensorView& out) {
  const int tail = taps - 1;
  const SegmentState state(kernel, conv_state, sequence.slot, segment);
  std::array<float, (kMaxConvKernel - 1) * kSegment> history;
  if (sequence.has_state)
    state.load(0, tail, history.data());
  else
    std::fill_n(history.begin(), tail * segment.size, 0.0F);
  const ConvArgs args = conv_args(sequence, segment, taps, proj, weight, history.data(), out);
  kernel.causal_conv(args);
  state.store(tail, [&](int j) {
    const std::int64_t t = sequence.num_tokens - tail + j;
    return t < 0 ? history.data() + (t + tail) * segment.size : args.input + t * args.input_stride;
  });
}

// A verified sequence: a token at a time, the inputs before it rounded as in the state. What is kept are the inputs
// behind the oldest one and those of this step.
void convolve_verified(const Kernels& kernel, const Sequence& sequence, const Segment& segment, int taps,
                       const TensorView& proj, const TensorView& weight, const TensorView& conv_state,
                       const TensorView& out) {
  const int tail = taps - 1;
  const SegmentState state(kernel, conv_state, sequence.slot, segment);
  std::array<float, (kMaxConvKernel + kMaxDraftTokens) * kSegment> inputs;  // those before the step, then its own
  if (sequence.has_state)
    state.load(std::max(sequence.num_replayed - 1, 0), tail, inputs.data());
  else
    std::fill_n(inputs.begin(), tail * segment.size, 0.0F);
  ConvArgs args = conv_args(sequence, segment, taps, proj, weight, inputs.data(), out);
  args.num_tokens = 1;
  for (std::int64_t t = 0; t < sequence.num_tokens; ++t) {
    kernel.causal_conv(args);
    state.round(args.input, inputs.data() + (tail + t) * segment.size);
    args.input += args.input_stride, args.history += segment.size, args.out += args.out_stride;
  }
  const auto row_from = [&](std::int64_t first) {
    return [&inputs, &segment, first](int j) { return inputs.data() + (first + j) * segment.size; };
  };
  state.store(static_cast<int>(tail - 1 + sequence.num_tokens), row_from(1));
  if (sequence.num_snapshot_tokens > 0)
    SegmentState(kernel, conv_state, sequence.snapshot_slot, segment)
        .store(tail, row_from(sequence.num_snapshot_tokens));
}

// decay = exp(g) and beta of one token and head. In double: exp(A_log) multiplies every error of the softplus.
void gates_of(float a, float b, float A_log, float dt_bias, float* gates) {
  const double x = static_cast<double>(a) + static_cast<double>(dt_bias);
  const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
  gates[0] = static_cast<float>(std::exp(-std::exp(static_cast<double>(A_log)) * softplus));
  gates[1] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(b))));
}

// Some rows of a state of any dtype, as f32.
class StateRows {
 public:
  StateRows(const Kernels& kernel, Float type, float* values, std::int64_t size)
      : kernel_(kernel), type_(type), values_(values), size_(size) {}
  float* values() const { return values_; }
  bool is_f32() const { return type_ == Float::f32; }

  // null: zeros.
  void load(const void* from) const {
    if (from == nullptr)
      std::fill_n(values_, size_, 0.0F);
    else
      kernel_.widen(type_, from, size_, values_);
  }
  void store(void* to) const { kernel_.narrow(type_, values_, size_, to); }
  // To what would be read back.
  void round() const {
    if (is_f32()) return;
    std::array<std::uint16_t, kStateRows * kMaxKeyHeadDim> stored;
    store(stored.data());
    load(stored.data());
  }

 private:
  const Kernels& kernel_;
  Float type_;
  float* values_;
  std::int64_t size_;
};

// Calls f(args) with the tokens that need no rounding of the state between them: all with an f32 state, else one by
// one. `next` moves args on by so many tokens.
template <class Args, class F, class Next>
void run_rounded(const StateRows& state, Args args, std::int64_t num_tokens, const F& f, const Next& next) {
  args.num_tokens = state.is_f32() ? num_tokens : 1;
  for (std::int64_t t = 0; t < num_tokens; t += args.num_tokens) {
    f(args);
    state.round();
    next(args);
  }
}

// Where the rows of one head of a verified sequence (GdnSequences::num_accepted) lie among its replay rows.
struct VerifiedRows {
  float *k, *updates, *decay;
  std::int64_t stride;
};

// Whether token `t` left rows that change nothing.
bool is_identity(const VerifiedRows& rows, std::int64_t t, int num_rows) {
  const float* updates = rows.updates + t * rows.stride;
  return rows.decay[t * rows.stride] == 1.0F &&
         std::all_of(updates, updates + num_rows, [](float update) { return update == 0.0F; });
}

// Brings the state of a verified sequence, `state`, up to what was accepted; returns whether that changed it.
bool replay_accepted(const Kernels& kernel, const Sequence& sequence, const StateRows& state, const DeltaArgs& span,
                     const VerifiedRows& rows) {
  std::int64_t num_tokens = sequence.num_replayed;
  while (num_tokens > 0 && is_identity(rows, num_tokens - 1, span.num_rows)) --num_tokens;
  run_rounded(state,
              ReplayArgs{.num_tokens = 0,
                         .key_dim = span.key_dim,
                         .num_rows = span.num_rows,
                         .k = rows.k,
                         .updates = rows.updates,
                         .decay = rows.decay,
                         .stride = rows.stride,
                         .state = state.values()},
              num_tokens, kernel.replay,
              [](ReplayArgs& args) { args.k += args.stride, args.updates += args.stride, args.decay += args.stride; });
  return num_tokens > 0;
}

// The rows of one head of a verified sequence: the state is brought up to what was accepted and written back; the
// tokens of this step go on from it, and leave their updates in `rows`. A token without drafts is certain to stay: it
// becomes a part of the state at once, and its update in `rows` is none.
//   span  of all tokens of the step; `state` is that of `state`, which may be the committed rows themselves
void advance_verified(const Kernels& kernel, const Sequence& sequence, const StateRows& state, DeltaArgs span,
                      const VerifiedRows& rows, void* committed, void* snapshot) {
  const bool in_place = state.values() == committed, is_certain = sequence.is_certain();
  if (!in_place || !sequence.has_state) state.load(sequence.has_state ? committed : nullptr);
  const bool changed = replay_accepted(kernel, sequence, state, span, rows);
  if (!is_certain && (changed || !sequence.has_state)) state.store(committed);
  span.updates = rows.updates, span.updates_stride = rows.stride;
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    DeltaArgs args = span;
    const auto skip = [](DeltaArgs& tokens, std::int64_t count) {
      tokens.q += count * tokens.stride, tokens.k += count * tokens.stride, tokens.v += count * tokens.stride;
      tokens.scalars += count * tokens.scalars_stride, tokens.gates += count * tokens.gates_stride;
      tokens.out += count * tokens.out_stride, tokens.updates += count * tokens.updates_stride;
    };
    skip(args, begin);
    run_rounded(state, args, end - begin, kernel.delta_rule, [&](DeltaArgs& tokens) { skip(tokens, 1); });
  };
  run(0, sequence.num_snapshot_tokens);
  if (sequence.num_snapshot_tokens > 0) state.store(snapshot);
  run(sequence.num_snapshot_tokens, sequence.num_tokens);
  if (!is_certain) return;
  if (!in_place) state.store(committed);
  std::fill_n(rows.updates, span.num_rows, 0.0F);
}

}  // namespace

void causal_conv(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                 TensorView proj, TensorView weight, const ops::GdnSequences& sequences, TensorView conv_state,
                 TensorView out) {
  DELTAIC_CHECK(shape.conv_kernel <= kMaxConvKernel, "causal_conv: conv_kernel is ", shape.conv_kernel,
                ", the most is ", kMaxConvKernel);
  DELTAIC_CHECK(sequences.num_draft_tokens <= kMaxDraftTokens, "causal_conv: num_draft_tokens is ",
                sequences.num_draft_tokens, ", the most is ", kMaxDraftTokens);
  const Kernels& kernel = kernels();
  const Segments segments(shape, layout);
  const std::int64_t num_segments = segments.count(), num_seqs = sequences.state_indices.shape[0];
  const std::int64_t tokens_per_seq = (proj.shape[0] + num_seqs - 1) / num_seqs;
  threads.parallel_for(
      num_seqs * num_segments, grain_of(8 * kSegment * tokens_per_seq), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const Sequence sequence = sequence_at(sequences, i / num_segments, proj.shape[0], conv_state.shape[0]);
          if (sequence.num_tokens == 0) continue;
          const auto run = sequence.is_verified ? convolve_verified : convolve;
          run(kernel, sequence, segments[i % num_segments], shape.conv_kernel, proj, weight, conv_state, out);
        }
      });
}

void gated_delta_rule(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView replay, TensorView out) {
  DELTAIC_CHECK(shape.key_head_dim <= kMaxKeyHeadDim, "gated_delta_rule: key_head_dim is ", shape.key_head_dim,
                ", the most is ", kMaxKeyHeadDim);
  const Kernels& kernel = kernels();
  const std::int64_t num_tokens = qkv.shape[0], num_seqs = sequences.state_indices.shape[0];
  const std::int64_t key_heads = shape.num_key_heads, value_heads = shape.num_value_heads, r = shape.heads_per_group();
  const std::int64_t key_dim = shape.key_head_dim, value_dim = shape.value_head_dim;
  // Of each token: 3 scalars a key head, then 2 gates a value head.
  const std::int64_t token_floats = 3 * key_heads + 2 * value_heads;
  auto* const prepared =
      static_cast<float*>(threads.workspace(static_cast<std::size_t>(num_tokens * token_floats) * sizeof(float)));
  const float scale = 1.0F / std::sqrt(static_cast<float>(key_dim));
  const float* const log_decay = A_log.as<float>();
  threads.parallel_for(
      num_tokens, grain_of(2 * key_heads * key_dim + 64 * value_heads), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          float* scalars = prepared + t * token_floats;
          const float* row = qkv.as<float>() + t * qkv.stride[0];
          for (std::int64_t g = 0; g < key_heads; ++g)
            kernel.qk_scalars(row + g * key_dim, row + (key_heads + g) * key_dim, key_dim, scale, scalars + 3 * g);
          const float* raw = proj.as<float>() + t * proj.stride[0];
          for (std::int64_t h = 0; h < value_heads; ++h)
            gates_of(raw[layout.a + h / r * layout.a_group_stride + h % r],
                     raw[layout.b + h / r * layout.b_group_stride + h % r], log_decay[h], dt_bias.as<float>()[h],
                     scalars + 3 * key_heads + 2 * h);
        }
      });

  const std::int64_t row_blocks = (value_dim + kStateRows - 1) / kStateRows;
  const Float type = float_type(temporal.dtype);
  const auto element = static_cast<std::int64_t>(size_of(temporal.dtype));
  const auto replay_rows = [&](const Sequence& sequence) {
    DELTAIC_CHECK(sequence.slot < replay.shape[0], "a verified sequence has state slot ", sequence.slot,
                  ", there are rows for ", replay.shape[0]);
    return replay.as<float>() + sequence.slot * replay.stride[0];
  };
  threads.parallel_for(num_seqs * value_heads * row_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) std::array<float, kStateRows * kMaxKeyHeadDim> widened;
    for (std::int64_t i = begin; i < end; ++i) {
      const Sequence sequence = sequence_at(sequences, i / (value_heads * row_blocks), num_tokens, temporal.shape[0]);
      if (sequence.num_tokens == 0) continue;
      const std::int64_t h = i / row_blocks % value_heads, first = i % row_blocks * kStateRows;
      const std::int64_t num_rows = std::min<std::int64_t>(kStateRows, value_dim - first), size = num_rows * key_dim;
      const auto rows_of = [&](std::int64_t slot) {
        return static_cast<char*>(temporal.data) +
               (slot * temporal.stride[0] + h * temporal.stride[1] + first * key_dim) * element;
      };
      char* const rows = rows_of(sequence.slot);
      const bool in_place = type == Float::f32 && (!sequence.is_verified || sequence.is_certain());
      const StateRows state(kernel, type, in_place ? reinterpret_cast<float*>(rows) : widened.data(), size);
      const float* row = qkv.as<float>() + sequence.begin * qkv.stride[0];
      const float* scalars = prepared + sequence.begin * token_floats;
      const DeltaArgs span{.num_tokens = sequence.num_tokens,
                           .key_dim = static_cast<int>(key_dim),
                           .num_rows = static_cast<int>(num_rows),
                           .q = row + h / r * key_dim,
                           .k = row + (key_heads + h / r) * key_dim,
                           .v = row + 2 * key_heads * key_dim + h * value_dim + first,
                           .stride = qkv.stride[0],
                           .scalars = scalars + 3 * (h / r),
                           .scalars_stride = token_floats,
                           .gates = scalars + 3 * key_heads + 2 * h,
                           .gates_stride = token_floats,
                           .state = state.values(),
                           .out = out.as<float>() + sequence.begin * out.stride[0] + h * value_dim + first,
                           .out_stride = out.stride[0],
                           .updates = nullptr,
                           .updates_stride = 0};
      if (sequence.is_verified) {
        float* const verified = replay_rows(sequence);
        advance_verified(kernel, sequence, state, span,
                         {.k = verified + h / r * key_dim,
                          .updates = verified + shape.replay_update() + h * value_dim + first,
                          .decay = verified + shape.replay_decay() + h,
                          .stride = replay.stride[1]},
                         rows, sequence.num_snapshot_tokens > 0 ? rows_of(sequence.snapshot_slot) : nullptr);
        continue;
      }
      if (!in_place || !sequence.has_state) state.load(sequence.has_state ? rows : nullptr);
      kernel.delta_rule(span);
      if (!in_place) state.store(rows);
    }
  });

  // What the heads of a sequence share in its rows: until now those of the step before were read.
  if (!sequences.has_drafts()) return;
  threads.parallel_for(
      num_seqs, grain_of(replay.shape[1] * key_heads * key_dim), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const Sequence sequence = sequence_at(sequences, i, num_tokens, temporal.shape[0]);
          if (!sequence.is_verified) continue;
          float* row = replay_rows(sequence);
          if (sequence.is_certain()) {  // its updates are none, whatever its keys
            std::fill_n(row + shape.replay_decay(), value_heads, 1.0F);
            continue;
          }
          for (std::int64_t t = sequence.begin; t < sequence.begin + sequence.num_tokens;
               ++t, row += replay.stride[1]) {
            std::copy_n(qkv.as<float>() + t * qkv.stride[0] + key_heads * key_dim, key_heads * key_dim, row);
            for (std::int64_t h = 0; h < value_heads; ++h)
              row[shape.replay_decay() + h] = prepared[t * token_floats + 3 * key_heads + 2 * h];
          }
        }
      });
}

}  // namespace deltaic::cpu

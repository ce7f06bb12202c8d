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
  std::int64_t begin, num_tokens, slot;
  bool has_state;
  int num_accepted;  // 0: plain
};

// Throws InvalidArgument for a slot or a token range outside the tensors.
Sequence sequence_at(const ops::GdnSequences& sequences, std::int64_t i, std::int64_t num_tokens,
                     std::int64_t num_slots) {
  const std::int32_t* start = sequences.query_start_loc.as<std::int32_t>();
  const std::int32_t slot = sequences.state_indices.as<std::int32_t>()[i * sequences.state_indices.stride[0]];
  if (slot < 0) return {.begin = 0, .num_tokens = 0, .slot = -1, .has_state = false, .num_accepted = 0};
  DELTAIC_CHECK(0 <= start[i] && start[i] <= start[i + 1] && start[i + 1] <= num_tokens, "sequence ", i, " has tokens ",
                start[i], " to ", start[i + 1], " of ", num_tokens);
  DELTAIC_CHECK(slot < num_slots, "sequence ", i, " has state slot ", slot, ", there are ", num_slots);
  Sequence sequence{.begin = start[i],
                    .num_tokens = start[i + 1] - start[i],
                    .slot = slot,
                    .has_state = sequences.has_initial_state.as<std::uint8_t>()[i] != 0,
                    .num_accepted = sequences.has_drafts() ? sequences.num_accepted.as<std::int32_t>()[i] : 0};
  if (sequence.num_accepted == 0) return sequence;
  const int num_columns = 1 + sequences.num_draft_tokens;
  DELTAIC_CHECK(0 < sequence.num_accepted && sequence.num_accepted <= num_columns, "sequence ", i, " has accepted ",
                sequence.num_accepted, " tokens, with ", sequences.num_draft_tokens, " drafts at most");
  DELTAIC_CHECK(sequence.num_tokens <= num_columns, "sequence ", i, " verifies ", sequence.num_tokens, " tokens, with ",
                sequences.num_draft_tokens, " drafts at most");
  DELTAIC_CHECK(slot + num_columns <= num_slots, "sequence ", i, " has ", num_columns, " state slots from ", slot,
                ", there are ", num_slots);
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
    for (int j = 0; j < count; ++j) {
      const float* row = row_at(j);
      for (std::int64_t c = 0; c < size_; ++c) channels[c * count + j] = row[c];
    }
    if (is_dense() && count == num_positions_) return kernel_.narrow(type_, channels.data(), size_ * count, data_);
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
    state.load(sequence.num_accepted - 1, tail, inputs.data());
  else
    std::fill_n(inputs.begin(), tail * segment.size, 0.0F);
  ConvArgs args = conv_args(sequence, segment, taps, proj, weight, inputs.data(), out);
  args.num_tokens = 1;
  for (std::int64_t t = 0; t < sequence.num_tokens; ++t) {
    kernel.causal_conv(args);
    state.round(args.input, inputs.data() + (tail + t) * segment.size);
    args.input += args.input_stride, args.history += segment.size, args.out += args.out_stride;
  }
  state.store(static_cast<int>(tail - 1 + sequence.num_tokens),
              [&](int j) { return inputs.data() + (1 + j) * segment.size; });
}

// decay = exp(g) and beta of one token and head. In double: exp(A_log) multiplies every error of the softplus.
void gates_of(float a, float b, float A_log, float dt_bias, float* gates) {
  const double x = static_cast<double>(a) + static_cast<double>(dt_bias);
  const double softplus = x > 20.0 ? x : std::log1p(std::exp(x));
  gates[0] = static_cast<float>(std::exp(-std::exp(static_cast<double>(A_log)) * softplus));
  gates[1] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(b))));
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
          const auto run = sequence.num_accepted > 0 ? convolve_verified : convolve;
          run(kernel, sequence, segments[i % num_segments], shape.conv_kernel, proj, weight, conv_state, out);
        }
      });
}

void gated_delta_rule(ThreadPool& threads, const ops::GdnShape& shape, const ops::GdnProjectionLayout& layout,
                      TensorView qkv, TensorView proj, TensorView A_log, TensorView dt_bias,
                      const ops::GdnSequences& sequences, TensorView temporal, TensorView out) {
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
      const float* row = qkv.as<float>() + sequence.begin * qkv.stride[0];
      const float* scalars = prepared + sequence.begin * token_floats;
      DeltaArgs span{.num_tokens = sequence.num_tokens,
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
                     .state = nullptr,
                     .out = out.as<float>() + sequence.begin * out.stride[0] + h * value_dim + first,
                     .out_stride = out.stride[0]};
      // From the state in one slot to the one in another, which may be the same.
      const auto advance = [&](const char* from, char* to) {
        span.state = type == Float::f32 ? reinterpret_cast<float*>(to) : widened.data();
        if (from == nullptr)
          std::fill(span.state, span.state + size, 0.0F);
        else if (type != Float::f32)
          kernel.widen(type, from, size, span.state);
        else if (from != to)
          std::copy_n(reinterpret_cast<const float*>(from), size, span.state);
        kernel.delta_rule(span);
        if (type != Float::f32) kernel.narrow(type, span.state, size, to);
      };
      const bool is_verified = sequence.num_accepted > 0;
      const std::int64_t source = sequence.slot + (is_verified ? sequence.num_accepted - 1 : 0);
      const char* from = sequence.has_state ? rows_of(source) : nullptr;
      if (!is_verified) {
        advance(from, rows_of(sequence.slot));
        continue;
      }
      span.num_tokens = 1;
      for (std::int64_t t = 0; t < sequence.num_tokens; ++t) {
        char* to = rows_of(sequence.slot + t);
        advance(from, to);
        from = to;
        span.q += span.stride, span.k += span.stride, span.v += span.stride;
        span.scalars += token_floats, span.gates += token_floats, span.out += span.out_stride;
      }
    }
  });
}

}  // namespace deltaic::cpu

#include "cpp/src/ops/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "cpp/src/ops/checks.h"

namespace deltaic::ops {
namespace {

// The frequency index at which a wave turns `turns` times over the original context (yarn).
double dimension_of(double turns, const RopeConfig& rope, double context, int rotary_dim) {
  return rotary_dim * std::log(context / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.theta));
}

// How far each frequency is interpolated: 0 keeps it, 1 divides it by the factor.
std::vector<float> yarn_ramp(const RopeConfig& rope, double context, int rotary_dim) {
  double low = dimension_of(rope.beta_fast, rope, context, rotary_dim);
  double high = dimension_of(rope.beta_slow, rope, context, rotary_dim);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, rotary_dim - 1.0);
  if (low == high) high += 0.001;
  std::vector<float> ramp(static_cast<std::size_t>(rotary_dim / 2));
  for (std::size_t j = 0; j < ramp.size(); ++j)
    ramp[j] =
        std::clamp((static_cast<float>(j) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0F, 1.0F);
  return ramp;
}

std::uint8_t stream_of(int frequency, const std::array<int, 3>& section) {
  for (const int stream : {1, 2})
    if (frequency % 3 == stream && frequency < 3 * section[stream]) return static_cast<std::uint8_t>(stream);
  return 0;
}

}  // namespace

RotaryTable make_rotary_table(const ModelConfig& model) {
  const RopeConfig& rope = model.rope;
  const int rotary_dim = model.rotary_dim;
  DELTAIC_CHECK(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= model.head_dim, "rotary_dim is ", rotary_dim,
                ", it must be even and at most head_dim ", model.head_dim);
  RotaryTable table;
  table.rotary_dim = rotary_dim;
  std::vector<float> ramp;
  if (rope.type == RopeType::yarn) {
    const double context = rope.original_max_position_embeddings > 0.0 ? rope.original_max_position_embeddings
                                                                       : model.max_position_embeddings;
    ramp = yarn_ramp(rope, context, rotary_dim);
    const double by_default = rope.factor > 1.0 ? 0.1 * std::log(rope.factor) + 1.0 : 1.0;
    table.attention_factor = static_cast<float>(rope.attention_factor.value_or(by_default));
  }
  const float factor = static_cast<float>(rope.factor);
  for (int j = 0; j < rotary_dim / 2; ++j) {
    const float exponent = static_cast<float>(2 * j) / static_cast<float>(rotary_dim);
    const float period = std::pow(static_cast<float>(rope.theta), exponent);
    float frequency = 1.0F / period;
    if (rope.type == RopeType::linear) frequency /= factor;
    if (rope.type == RopeType::yarn) {
      const float kept = 1.0F - ramp[static_cast<std::size_t>(j)];
      frequency = 1.0F / (factor * period) * (1.0F - kept) + frequency * kept;
    }
    table.inv_freq.push_back(frequency);
    table.stream.push_back(stream_of(j, rope.mrope_section));
  }
  return table;
}

void qk_norm_rope(const Context& ctx, const QkNormRopeArgs& args) {
  const char* op = "qk_norm_rope";
  const auto check_float = [&](const char* field, const TensorView& tensor, std::initializer_list<std::int64_t> shape) {
    if (ctx.device.type == DeviceType::cpu) return check_tensor(op, field, tensor, ctx, {DType::f32}, shape);
    check_tensor(op, field, tensor, ctx, {DType::f32, DType::f16, DType::bf16}, shape);
    DELTAIC_CHECK(tensor.dtype == args.q.dtype, op, ": ", field, " is ", name(tensor.dtype), ", q is ",
                  name(args.q.dtype));
  };
  DELTAIC_CHECK(args.rotary != nullptr, op, ": rotary is not set");
  check_float("q", args.q, {kAnySize, kAnySize, kAnySize});
  const std::int64_t num_tokens = args.q.shape[0], head_dim = args.q.shape[2];
  check_float("k", args.k, {num_tokens, kAnySize, head_dim});
  const std::int64_t num_kv_heads = args.k.shape[1];
  check_float("v", args.v, {num_tokens, num_kv_heads, head_dim});
  check_contiguous(op, "q_norm_weight", args.q_norm_weight, ctx, {DType::f32}, {head_dim});
  check_contiguous(op, "k_norm_weight", args.k_norm_weight, ctx, {DType::f32}, {head_dim});
  check_tensor(op, "positions", args.positions, ctx, {DType::i64}, {kAnySize, num_tokens});
  check_contiguous(op, "slot_mapping", args.slot_mapping, ctx, {DType::i64}, {num_tokens});
  const std::int64_t num_streams = args.positions.shape[0];
  DELTAIC_CHECK(num_streams == 1 || num_streams == 3, op, ": positions has ", num_streams, " rows, expected 1 or 3");
  for (const auto& [field, cache] : {std::pair{"k_cache", args.k_cache}, std::pair{"v_cache", args.v_cache}}) {
    check_tensor(op, field, cache, ctx, {DType::f32, DType::f16, DType::bf16},
                 {args.k_cache.shape[0], args.k_cache.shape[1], num_kv_heads, head_dim});
  }
  DELTAIC_CHECK(args.rotary->rotary_dim <= head_dim, op, ": rotary_dim is ", args.rotary->rotary_dim, ", head_dim is ",
                head_dim);
  if (num_tokens == 0) return;
  switch (ctx.device.type) {
    case DeviceType::cpu:
      return cpu::qk_norm_rope(threads_of(op, ctx), args);
    case DeviceType::cuda:
      DELTAIC_CHECK(args.k_cache.dtype == args.v_cache.dtype, op, ": k_cache is ", name(args.k_cache.dtype),
                    ", v_cache is ", name(args.v_cache.dtype));
      return cuda::qk_norm_rope(ctx.stream, args);
  }
}

}  // namespace deltaic::ops

#include "cpp/src/stages/codec_transformer.h"

#include <algorithm>
#include <cmath>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/activation.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic {

namespace {

StageLinear read_projection(WeightReader& reader, const std::string& name, std::int64_t out, std::int64_t in) {
  StageLinear projection{.weight = reader.matrix(name + ".weight", out, in), .bias = {}};
  if (reader.has(name + ".bias")) projection.bias = reader.values(name + ".bias", {out});
  return projection;
}

Signal project(const ops::Context& ctx, const StageLinear& projection, Signal& x) {
  Signal y(x.length, projection.weight.out_features());
  projection.forward(ctx, x.view(), y.view());
  return y;
}

void add_scaled(Signal& x, const Signal& update, const Tensor& scale) {
  const float* s = scale.as<float>();
  for (std::int64_t t = 0; t < x.length; ++t)
    for (std::int64_t c = 0; c < x.channels; ++c)
      x.values[static_cast<std::size_t>(t * x.channels + c)] +=
          s[c] * update.values[static_cast<std::size_t>(t * x.channels + c)];
}

}  // namespace

CodecTransformer CodecTransformer::read(WeightReader& reader, StateLayout& layout, const CodecTransformerConfig& config,
                                        std::int64_t outer_size) {
  DELTAIC_CHECK(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0, config.num_heads,
                " query heads do not divide into ", config.num_kv_heads, " key/value heads");
  DELTAIC_CHECK(config.sliding_window >= 1, "sliding_window is ", config.sliding_window, ", it must be at least 1");
  CodecTransformer transformer;
  transformer.config_ = config;
  transformer.outer_size_ = outer_size;
  ModelConfig rope;
  rope.rotary_dim = config.head_dim;
  rope.head_dim = config.head_dim;
  rope.rope.theta = config.rope_theta;
  transformer.inv_freq_ = ops::make_rotary_table(rope).inv_freq;

  const std::int64_t width = config.hidden_size, q_size = std::int64_t{config.num_heads} * config.head_dim,
                     kv_size = std::int64_t{config.num_kv_heads} * config.head_dim;
  const std::string root = "pre_transformer.";
  if (reader.has(root + "input_proj.weight")) {
    transformer.input_ = read_projection(reader, root + "input_proj", width, outer_size);
    transformer.output_ = read_projection(reader, root + "output_proj", outer_size, width);
  } else {
    DELTAIC_CHECK(width == outer_size, "the codec's transformer is ", width, " wide, what it is given ", outer_size);
  }
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string prefix = root + "layers." + std::to_string(i) + ".";
    Layer layer{.input_norm = reader.values(prefix + "input_layernorm.weight", {width}),
                .post_attention_norm = reader.values(prefix + "post_attention_layernorm.weight", {width}),
                .attention_scale = reader.values(prefix + "self_attn_layer_scale.scale", {width}),
                .mlp_scale = reader.values(prefix + "mlp_layer_scale.scale", {width}),
                .q = read_projection(reader, prefix + "self_attn.q_proj", q_size, width),
                .k = read_projection(reader, prefix + "self_attn.k_proj", kv_size, width),
                .v = read_projection(reader, prefix + "self_attn.v_proj", kv_size, width),
                .o = read_projection(reader, prefix + "self_attn.o_proj", width, q_size),
                .gate = read_projection(reader, prefix + "mlp.gate_proj", config.intermediate_size, width),
                .up = read_projection(reader, prefix + "mlp.up_proj", config.intermediate_size, width),
                .down = read_projection(reader, prefix + "mlp.down_proj", width, config.intermediate_size)};
    layer.state = layout.add(0);  // grows up to sliding_window - 1 positions
    transformer.layers_.push_back(std::move(layer));
  }
  transformer.norm_ = reader.values(root + "norm.weight", {width});
  return transformer;
}

Signal CodecTransformer::forward(const ops::Context& ctx, StreamState& state, Signal x) const {
  if (x.length == 0) return x;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  if (input_.weight.is_set()) x = project(ctx, input_, x);
  Signal normed(x.length, x.channels);
  for (const Layer& layer : layers_) {
    attend(ctx, layer, state, x);
    ops::rms_norm(ctx, x.view(), layer.post_attention_norm.view(), eps, normed.view());
    Signal gate = project(ctx, layer.gate, normed), up = project(ctx, layer.up, normed);
    ops::silu_mul(ctx, gate.view(), up.view(), gate.view());
    add_scaled(x, project(ctx, layer.down, gate), layer.mlp_scale);
  }
  ops::rms_norm(ctx, x.view(), norm_.view(), eps, x.view());
  return output_.weight.is_set() ? project(ctx, output_, x) : x;
}

void CodecTransformer::rotate(Signal& rows, std::int64_t first_position) const {
  const std::int64_t half = config_.head_dim / 2;
  for (std::int64_t t = 0; t < rows.length; ++t)
    for (std::int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(first_position + t) * inv_freq_[static_cast<std::size_t>(i)];
      const float cosine = std::cos(angle), sine = std::sin(angle);
      for (std::int64_t head = 0; head < rows.channels; head += config_.head_dim) {
        float* x = rows.values.data() + t * rows.channels + head + i;
        const float a = x[0], b = x[half];
        x[0] = a * cosine - b * sine;
        x[half] = b * cosine + a * sine;
      }
    }
}

void CodecTransformer::attend(const ops::Context& ctx, const Layer& layer, StreamState& state, Signal& x) const {
  Signal normed(x.length, x.channels);
  ops::rms_norm(ctx, x.view(), layer.input_norm.view(), static_cast<float>(config_.rms_norm_eps), normed.view());
  Signal q = project(ctx, layer.q, normed), k = project(ctx, layer.k, normed);
  const Signal v = project(ctx, layer.v, normed);
  rotate(q, state.num_frames);
  rotate(k, state.num_frames);

  // Rows of [k | v]: the past, then this piece.
  std::vector<float>& past = state.tails[static_cast<std::size_t>(layer.state)];
  const std::int64_t kv_size = k.channels, row_size = 2 * kv_size;
  const auto num_past = static_cast<std::int64_t>(past.size()) / row_size;
  for (std::int64_t t = 0; t < x.length; ++t) {
    past.insert(past.end(), k.values.begin() + t * kv_size, k.values.begin() + (t + 1) * kv_size);
    past.insert(past.end(), v.values.begin() + t * kv_size, v.values.begin() + (t + 1) * kv_size);
  }
  const std::int64_t dim = config_.head_dim, group = config_.num_heads / config_.num_kv_heads;
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
  Signal out(x.length, q.channels);
  ctx.threads->parallel_for(x.length * config_.num_heads, 4, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> weights;
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t t = item / config_.num_heads, head = item % config_.num_heads;
      const float* query = q.values.data() + t * q.channels + head * dim;
      const std::int64_t last = num_past + t, first = std::max<std::int64_t>(0, last - config_.sliding_window + 1);
      const float* rows = past.data() + head / group * dim;
      weights.clear();
      float largest = -INFINITY, total = 0.0F;
      for (std::int64_t i = first; i <= last; ++i) {
        const float* key = rows + i * row_size;
        float score = 0.0F;
        for (std::int64_t d = 0; d < dim; ++d) score += query[d] * key[d];
        weights.push_back(score * scale);
        largest = std::max(largest, weights.back());
      }
      for (float& weight : weights) total += weight = std::exp(weight - largest);
      float* sum = out.values.data() + t * out.channels + head * dim;
      for (std::int64_t i = first; i <= last; ++i) {
        const float *value = rows + i * row_size + kv_size,
                    weight = weights[static_cast<std::size_t>(i - first)] / total;
        for (std::int64_t d = 0; d < dim; ++d) sum[d] += weight * value[d];
      }
    }
  });
  const std::int64_t num_rows = num_past + x.length,
                     num_dropped = std::max<std::int64_t>(0, num_rows - config_.sliding_window + 1);
  past.erase(past.begin(), past.begin() + num_dropped * row_size);
  add_scaled(x, project(ctx, layer.o, out), layer.attention_scale);
}

}  // namespace deltaic

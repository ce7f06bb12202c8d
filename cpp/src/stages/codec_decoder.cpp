#include "cpp/src/stages/codec_decoder.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "cpp/src/check.h"
#include "cpp/src/core/thread_pool.h"
#include "cpp/src/ops/linear.h"

namespace deltaic {

namespace {

constexpr int kDilations[] = {1, 3, 9};

// Vectors of codes. The quantizer of Qwen3-TTS: codebook 0, and the sum of the others, each through a projection; of
// Qwen3-Omni: the mean over one table.
struct CodeEmbedding {
  std::vector<Tensor> tables;          // [codebook_size, dim] each
  StageLinear first, rest;             // without memory: the mean instead
  std::int64_t dim = 0, out_size = 0;  // of a table's row; of the result
  std::int64_t num_codebooks = 0, codebook_size = 0;

  static CodeEmbedding read(WeightReader& reader, const CodecConfig& config);
  Signal forward(const ops::Context& ctx, std::span<const std::int32_t> codes) const;
};

Tensor read_codebook(WeightReader& reader, const std::string& name, std::int64_t size, std::int64_t dim) {
  constexpr float kSmallestUsage = 1e-5F;
  Tensor table = reader.values(name + "embedding_sum", {size, dim});
  const Tensor usage = reader.values(name + "cluster_usage", {size});
  for (std::int64_t i = 0; i < size; ++i)
    for (std::int64_t d = 0; d < dim; ++d)
      table.as<float>()[i * dim + d] /= std::max(usage.as<float>()[i], kSmallestUsage);
  return table;
}

// A 1 x 1 convolution without bias.
StageLinear read_pointwise(WeightReader& reader, const std::string& name, std::int64_t out, std::int64_t in) {
  const auto values = std::make_shared<Tensor>(reader.values(name + ".weight", {out, in, 1}));
  return {.weight = {.view = values->view().reshape({out, in}), .owner = values}, .bias = {}};
}

CodeEmbedding CodeEmbedding::read(WeightReader& reader, const CodecConfig& config) {
  CodeEmbedding embedding;
  embedding.num_codebooks = config.num_codebooks, embedding.codebook_size = config.codebook_size;
  const std::int64_t size = config.codebook_size;
  if (config.codebook_dim == 0) {
    embedding.dim = embedding.out_size = config.latent_dim;
    embedding.tables.push_back(reader.values("code_embedding.weight", {config.num_codebooks * size, embedding.dim}));
    return embedding;
  }
  embedding.out_size = config.codebook_dim;
  embedding.dim = config.codebook_dim / 2;
  const std::string first = "quantizer.rvq_first.", rest = "quantizer.rvq_rest.";
  embedding.tables.push_back(read_codebook(reader, first + "vq.layers.0._codebook.", size, embedding.dim));
  for (int i = 0; i + 1 < config.num_codebooks; ++i)
    embedding.tables.push_back(
        read_codebook(reader, rest + "vq.layers." + std::to_string(i) + "._codebook.", size, embedding.dim));
  embedding.first = read_pointwise(reader, first + "output_proj", embedding.out_size, embedding.dim);
  embedding.rest = read_pointwise(reader, rest + "output_proj", embedding.out_size, embedding.dim);
  return embedding;
}

Signal CodeEmbedding::forward(const ops::Context& ctx, std::span<const std::int32_t> codes) const {
  const auto length = static_cast<std::int64_t>(codes.size()) / num_codebooks;
  Signal head(length, dim), sum(length, dim);
  const bool has_quantizer = first.weight.is_set();
  for (std::int64_t t = 0; t < length; ++t)
    for (std::int64_t book = 0; book < num_codebooks; ++book) {
      const std::int64_t code = codes[static_cast<std::size_t>(t * num_codebooks + book)];
      const float* row = has_quantizer ? tables[static_cast<std::size_t>(book)].as<float>() + code * dim
                                       : tables[0].as<float>() + (book * codebook_size + code) * dim;
      Signal& target = has_quantizer && book == 0 ? head : sum;
      for (std::int64_t d = 0; d < dim; ++d) target.values[static_cast<std::size_t>(t * dim + d)] += row[d];
    }
  if (!has_quantizer) {
    for (float& value : sum.values) value /= static_cast<float>(num_codebooks);
    return sum;
  }
  Signal out(length, out_size);
  first.forward(ctx, head.view(), out.view());
  rest.forward(ctx, sum.view(), out.view(), /*accumulate=*/true);
  return out;
}

void add(Signal& x, const Signal& other) {
  for (std::size_t i = 0; i < x.values.size(); ++i) x.values[i] += other.values[i];
}

StageLinear read_linear(WeightReader& reader, const std::string& name, std::int64_t out, std::int64_t in) {
  return {.weight = reader.matrix(name + ".weight", out, in), .bias = reader.values(name + ".bias", {out})};
}

// x + gamma * W2 gelu(W1 norm(depthwise(x))).
struct ConvNext {
  StreamingDepthwise depthwise;
  Tensor norm_weight, norm_bias, gamma;
  StageLinear expand, reduce;

  static ConvNext read(WeightReader& reader, StateLayout& layout, const std::string& name, std::int64_t channels) {
    return {.depthwise = StreamingDepthwise::read(reader, layout, name + "dwconv.conv", channels, 7),
            .norm_weight = reader.values(name + "norm.weight", {channels}),
            .norm_bias = reader.values(name + "norm.bias", {channels}),
            .gamma = reader.values(name + "gamma", {channels}),
            .expand = read_linear(reader, name + "pwconv1", 4 * channels, channels),
            .reduce = read_linear(reader, name + "pwconv2", channels, 4 * channels)};
  }

  void layer_norm(Signal& x) const {
    constexpr double kEps = 1e-6;
    for (std::int64_t t = 0; t < x.length; ++t) {
      float* row = x.values.data() + t * x.channels;
      double mean = 0.0, variance = 0.0;
      for (std::int64_t c = 0; c < x.channels; ++c) mean += row[c];
      mean /= static_cast<double>(x.channels);
      for (std::int64_t c = 0; c < x.channels; ++c) variance += (row[c] - mean) * (row[c] - mean);
      const double scale = 1.0 / std::sqrt(variance / static_cast<double>(x.channels) + kEps);
      for (std::int64_t c = 0; c < x.channels; ++c)
        row[c] = static_cast<float>((row[c] - mean) * scale) * norm_weight.as<float>()[c] + norm_bias.as<float>()[c];
    }
  }

  void forward(const ops::Context& ctx, StreamState& state, Signal& x) const {
    if (x.length == 0) return;
    Signal h = depthwise.forward(ctx, state, x);
    layer_norm(h);
    Signal inner(x.length, 4 * x.channels);
    expand.forward(ctx, h.view(), inner.view());
    for (float& value : inner.values) value = 0.5F * value * (1.0F + std::erf(value * 0.707106781F));
    reduce.forward(ctx, inner.view(), h.view());
    const float* scale = gamma.as<float>();
    for (std::int64_t i = 0; i < x.length * x.channels; ++i)
      x.values[static_cast<std::size_t>(i)] += scale[i % x.channels] * h.values[static_cast<std::size_t>(i)];
  }
};

struct Upsampling {
  StreamingUpsample up;
  ConvNext block;
};

struct ResidualUnit {
  SnakeBeta first_snake, second_snake;
  StreamingConv first, second;

  static ResidualUnit read(WeightReader& reader, StateLayout& layout, const std::string& name, std::int64_t channels,
                           int dilation) {
    return {.first_snake = SnakeBeta::read(reader, name + "act1.", channels),
            .second_snake = SnakeBeta::read(reader, name + "act2.", channels),
            .first = StreamingConv::read(reader, layout, name + "conv1.conv", channels, channels, 7, dilation),
            .second = StreamingConv::read(reader, layout, name + "conv2.conv", channels, channels, 1)};
  }
  void forward(const ops::Context& ctx, StreamState& state, Signal& x) const {
    Signal h = x;
    first_snake.forward(ctx, h);
    h = first.forward(ctx, state, h);
    second_snake.forward(ctx, h);
    add(x, second.forward(ctx, state, h));
  }
};

struct DecoderBlock {
  SnakeBeta snake;
  StreamingUpsample up;
  std::vector<ResidualUnit> units;
};

void check_rates(const char* field, const std::vector<int>& rates) {
  for (const int rate : rates)
    DELTAIC_CHECK(rate >= 1, "a codec whose ", field, " hold ", rate, "; each must be at least 1");
}

}  // namespace

struct CodecDecoder::Impl {
  Impl(const CodecConfig& codec_config, const StoredTensors& tensors, int num_threads)
      : config(codec_config), threads(num_threads), ctx{.device = {}, .stream = {}, .threads = &threads} {
    DELTAIC_CHECK(config.num_codebooks >= 1 && config.codebook_size >= 1, "a codec of ", config.num_codebooks,
                  " codebooks of ", config.codebook_size, " codes");
    check_rates("upsampling_ratios", config.upsampling_ratios);
    check_rates("upsample_rates", config.upsample_rates);
    const Checkpoint checkpoint = Checkpoint::from_stored(tensors, "the codec decoder");
    ViewReader reader(checkpoint);
    const bool has_quantizer = config.codebook_dim > 0;
    const std::int64_t latent = config.latent_dim;
    embedding = CodeEmbedding::read(reader, config);
    if (has_quantizer) pre_conv = StreamingConv::read(reader, layout, "pre_conv.conv", config.codebook_dim, latent, 3);
    transformer = CodecTransformer::read(reader, layout, config.transformer, latent);
    for (std::size_t i = 0; i < config.upsampling_ratios.size(); ++i) {
      const std::string name = "upsample." + std::to_string(i) + ".";
      const int ratio = config.upsampling_ratios[i];
      Upsampling stage;
      stage.up = StreamingUpsample::read(reader, layout, name + "0.conv", latent, latent, ratio, ratio, false);
      stage.block = ConvNext::read(reader, layout, name + "1.", latent);
      upsampling.push_back(std::move(stage));
      per_frame *= ratio;
    }
    input = StreamingConv::read(reader, layout, "decoder.0.conv", latent, config.decoder_dim, 7);
    std::int64_t channels = config.decoder_dim;
    for (std::size_t i = 0; i < config.upsample_rates.size(); ++i, channels /= 2) {
      const std::string name = "decoder." + std::to_string(i + 1) + ".block.";
      const int rate = config.upsample_rates[i];
      DecoderBlock block;
      block.snake = SnakeBeta::read(reader, name + "0.", channels);
      // Qwen3-Omni's decoder trims both sides of a transposed convolution, Qwen3-TTS's the right one alone.
      block.up = StreamingUpsample::read(reader, layout, name + "1.conv", channels, channels / 2, 2 * rate, rate,
                                         /*trims_left=*/!has_quantizer);
      for (std::size_t j = 0; j < std::size(kDilations); ++j)
        block.units.push_back(
            ResidualUnit::read(reader, layout, name + std::to_string(j + 2) + ".", channels / 2, kDilations[j]));
      blocks.push_back(std::move(block));
      per_frame *= rate;
      if (!has_quantizer) num_trimmed = (num_trimmed + 1) * rate;
    }
    const std::string last = "decoder." + std::to_string(config.upsample_rates.size() + 1) + ".";
    snake = SnakeBeta::read(reader, last, channels);
    output = StreamingConv::read(
        reader, layout, "decoder." + std::to_string(config.upsample_rates.size() + 2) + ".conv", channels, 1, 7);
    num_bytes = reader.num_bytes();
  }

  CodecConfig config;
  ThreadPool threads;
  ops::Context ctx;
  StateLayout layout;
  CodeEmbedding embedding;
  std::optional<StreamingConv> pre_conv;
  CodecTransformer transformer;
  std::vector<Upsampling> upsampling;
  StreamingConv input, output;
  std::vector<DecoderBlock> blocks;
  SnakeBeta snake;
  std::int64_t per_frame = 1;    // samples
  std::int64_t num_trimmed = 0;  // samples that a stream lacks at its start
  std::int64_t num_bytes = 0;
};

CodecDecoder::CodecDecoder(const CodecConfig& config, const StoredTensors& tensors, int num_threads)
    : impl_(std::make_unique<Impl>(config, tensors, num_threads)) {}
CodecDecoder::~CodecDecoder() = default;

CodecDecoder::Stream CodecDecoder::start() const {
  Stream stream;
  stream.state_ = impl_->layout.make();
  return stream;
}

std::vector<float> CodecDecoder::decode(Stream& stream, std::span<const std::int32_t> codes) {
  const Impl& self = *impl_;
  const ops::Context& ctx = self.ctx;
  const auto num_codebooks = static_cast<std::size_t>(self.config.num_codebooks);
  DELTAIC_CHECK(codes.size() % num_codebooks == 0, codes.size(), " codes are no frames of ", num_codebooks);
  for (std::size_t i = 0; i < codes.size(); ++i)
    DELTAIC_CHECK(0 <= codes[i] && codes[i] < self.config.codebook_size, "code ", codes[i], " of frame ",
                  stream.num_frames() + static_cast<std::int64_t>(i / num_codebooks), " is outside a codebook of ",
                  self.config.codebook_size);
  if (codes.empty()) return {};
  StreamState& state = stream.state_;
  Signal x = self.embedding.forward(ctx, codes);
  const std::int64_t num_frames = x.length;
  if (self.pre_conv) x = self.pre_conv->forward(ctx, state, x);
  x = self.transformer.forward(ctx, state, std::move(x));
  state.num_frames += num_frames;
  for (const Upsampling& stage : self.upsampling) {
    x = stage.up.forward(ctx, state, x);
    stage.block.forward(ctx, state, x);
  }
  x = self.input.forward(ctx, state, x);
  for (const DecoderBlock& block : self.blocks) {
    block.snake.forward(ctx, x);
    x = block.up.forward(ctx, state, x);
    for (const ResidualUnit& unit : block.units) unit.forward(ctx, state, x);
  }
  self.snake.forward(ctx, x);
  x = self.output.forward(ctx, state, x);
  for (float& sample : x.values) sample = std::clamp(sample, -1.0F, 1.0F);
  stream.num_samples_ += x.length;
  return std::move(x.values);
}

int CodecDecoder::samples_per_frame() const { return static_cast<int>(impl_->per_frame); }
std::int64_t CodecDecoder::num_samples(std::int64_t num_frames) const {
  return std::max<std::int64_t>(0, num_frames * impl_->per_frame - impl_->num_trimmed);
}
const CodecConfig& CodecDecoder::config() const { return impl_->config; }
std::int64_t CodecDecoder::num_bytes() const { return impl_->num_bytes; }

}  // namespace deltaic
